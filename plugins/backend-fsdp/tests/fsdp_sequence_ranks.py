"""What processes do in test_fsdp_ulysses: two or four, of which some share the rows of a batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsdp_rig as rig
import torch
import torch.distributed as dist
from fsdp_ranks import whole_weights

from drivetrain import RunError, UserError
from drivetrain_backend_fsdp import model as models
from drivetrain_backend_fsdp.sharding import whole

OPTIONS: dict[str, Any] = {"micro_batch_tokens": 30, "log_prob_chunk_tokens": 5, "max_grad_norm": 0.5,
                           "optimizer": {"eps": 1e-3}}  # fmt: skip


@contextmanager
def ranks(rank: int, size: int, folder: Path) -> Iterator[dict[str, Any]]:
    """A process group; what the rank puts into the dictionary is written to ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    seen: dict[str, Any] = {}
    yield seen
    torch.save(seen, folder / f"seen-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def update(made, data, rows: slice, terms=rig.TERMS, temperature: float = 0.8) -> dict[str, float]:
    """An optimizer step on some rows; counts are those of all."""
    metrics = made.update(data[rows], terms, rig.counts(data), temperature=temperature, lr_factor=1.0)
    return {name: metric.result() for name, metric in metrics.items()}


def gradients(made, data, rows: slice, terms=rig.TERMS) -> dict[str, Any]:
    """The metrics and the whole gradients, not clipped, of an update that changes nothing."""
    kept, recorder = (made.optimizer, made.context), rig.Recorder(made)
    made.context = replace(made.context, max_grad_norm=None)
    metrics = update(made, data, rows, terms, temperature=1.0)
    made.optimizer, made.context = kept
    return {"metrics": metrics, "gradients": {name: whole(grad) for name, grad in recorder.gradients.items()}}


def learn(made, data, rows: slice, terms=rig.TERMS) -> dict[str, Any]:
    """Gradients, then a step and the weights after it."""
    outputs = made.forward(data[rows], made.outputs, temperature=0.8)
    found = gradients(made, data, rows, terms)
    return found | {"outputs": outputs, "step": update(made, data, rows, terms), "weights": whole_weights(made)}


def pair(rank: int, folders: dict[str, Path], folder: Path) -> None:
    """Two ranks that share every row."""
    place: dict[str, Any] = {"rank": rank, "world_size": 2, "sequence_parallel": 2}
    with ranks(rank, 2, folder) as seen:
        for name in ("llama", "llama_gqa", "qwen3", "gemma2"):
            chosen = {"qwen3": "full", "llama_gqa": "selective"}.get(name, False)
            made = rig.backend(folders[name], **place, **OPTIONS, gradient_checkpointing=chosen)
            seen[name] = learn(made, rig.batch(), slice(None))
        data = rig.batch()
        seen["sharded"] = {}
        for name in ("gemma3", "mixtral", "qwen2_moe", "qwen3_moe"):
            made = rig.backend(folders[name], rank=rank, world_size=2, **OPTIONS)
            seen["sharded"][name] = gradients(made, data, slice(9, 12) if rank else slice(0, 9))
        seen["flex"] = {}
        for name in ("llama_gqa", "gemma2"):
            made = rig.backend(folders[name], **place, **OPTIONS | {"optimizer": None}, learns=False, attention="flex")
            seen["flex"][name] = made.forward(data, ["log_probs"], temperature=0.8)["log_probs"]
        try:
            made.forward(data[:6] if rank else data[6:], ["log_probs"], temperature=1.0)
        except RunError as error:
            seen["rows"] = str(error)
        try:
            made.live_module()
        except RunError as error:
            seen["live"] = str(error)
        critic = rig.critic(folders["qwen3"], **place, **OPTIONS)
        seen["critic"] = learn(critic, rig.critic_batch(), slice(None), rig.VALUE_TERMS)
        coarse = rig.backend(folders["qwen3"], **place, learns=False, compute_dtype="bfloat16")
        seen["coarse"] = coarse.forward(data, ["log_probs"], temperature=0.8)["log_probs"]
        rig.backend(folders["gemma2"], **place, learns=False, model={"dtype": "bfloat16"})  # is not refused
        with graphs_interpreted():
            made = rig.backend(folders["qwen3"], **place, **OPTIONS, compile=True, gradient_checkpointing="full")
            seen["compiled"] = gradients(made, data, slice(None))
        with neighbours_mixed():
            rig.backend(folders["llama"], rank=rank, world_size=2, learns=False)  # each rank sees all neighbours
            seen["mixed"] = []
            for dtype in ("float32", "bfloat16"):
                try:
                    rig.backend(folders["llama"], **place, learns=False, model={"dtype": dtype})
                except UserError as error:
                    seen["mixed"].append(str(error))


def square(rank: int, folders: dict[str, Path], folder: Path) -> None:
    """Four ranks: two pairs that share rows, then all of them."""
    with ranks(rank, 4, folder) as seen:
        pairs = {"rank": rank, "world_size": 4, "sequence_parallel": 2}
        first = rank < 2
        rows = {
            "alone": slice(0, 12) if first else slice(12, 12),  # a pair without any row
            "nothing": slice(0, 1) if first else slice(1, 12),  # a pair with nothing to learn
        }
        for name, model in folders.items():
            made = rig.backend(model, **pairs, **OPTIONS)
            seen[name] = {case: gradients(made, rig.batch(), mine) for case, mine in rows.items()}
            seen[name]["learn"] = learn(made, rig.batch(), slice(0, 9) if first else slice(9, 12))
        made = rig.backend(folders["llama"], rank=rank, world_size=4, sequence_parallel=4, **OPTIONS)
        seen["four"] = learn(made, rig.batch(), slice(None))


@contextmanager
def graphs_interpreted() -> Iterator[None]:
    """What torch.compile captures runs operation by operation, for compiling it takes a minute."""
    plain = torch.compile
    torch.compile = functools.partial(plain, backend="eager")
    try:
        yield
    finally:
        torch.compile = plain


@contextmanager
def neighbours_mixed() -> Iterator[None]:
    """Models have layers that add to each token the one before it in its sequence."""
    plain = models.load

    def load(*given):
        loaded = plain(*given)
        for layer in models.decoder_layers(loaded):
            layer.forward = mixing(layer.forward)
        return loaded

    def mixing(forward):
        def mixed(hidden, *args, position_ids=None, **kwargs):
            before = torch.nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0)) * (position_ids != 0)[..., None]
            return forward(hidden + before, *args, position_ids=position_ids, **kwargs)

        return mixed

    models.load = load
    try:
        yield
    finally:
        models.load = plain
