"""What processes do with a backend, and the same mathematics in plain padded PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import megatron_rig as rig
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from drivetrain import BackendContext, DataProto, LossTerm, NonFiniteError, OptimizerConfig, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.numerics import Counts, LossInputs
from drivetrain_backend_common.rows import Tokens
from drivetrain_backend_megatron import pipeline
from drivetrain_backend_megatron.backend import MegatronBackend
from drivetrain_backend_megatron.config import MegatronConfig

PROMPT, RESPONSE, ROWS = 7, 9, 12
TEMPERATURE, MAX_NORM, BUDGET = 0.8, 0.5, 24
TERMS = (LossTerm(name="clip", args={"clip_low": 0.1, "clip_high": 0.3}),
         LossTerm(name="kl", weight=0.3, args={"aggregation": "seq-mean-token-mean"}),
         LossTerm(name="entropy", weight=0.1))  # fmt: skip
OBJECTIVES = (TERMS, (LossTerm(name="gspo", args={"clip_low": 0.9, "clip_high": 9.0}),),
              (LossTerm(name="dpo", args={"beta": 0.5}),))  # fmt: skip
FACTORS = (1.0, 0.5, 0.8)  # of the learning rate
STEPS = len(OBJECTIVES)  # one with each: over tokens, over sequences, over pairs of them
MOVES = ((), ("parameters",), ("optimizer",), ("parameters", "optimizer"))
PAIRS = torch.tensor([0, 1, 2, 0, 3, 2, 3, 1, 4, 5, 4, 5])  # rows of a pair are no neighbours


class Adam(OptimizerConfig):
    """An epsilon that hides the rounding of small gradients."""

    name: str = "adamw"
    lr: float = 1e-2
    betas: tuple[float, float] = (0.8, 0.9)
    eps: float = 1e-3
    weight_decay: float = 0.1


def backend(
    folder: Path, *, rank: int = 0, world_size: int = 1, learns: bool = True, model: Any = None, hardware: str = "cpu",
    **options: Any,
) -> MegatronBackend:  # fmt: skip
    """A backend that is ready to work."""
    context = BackendContext(
        role="actor" if learns else "ref", model=ModelConfig(path=folder, **(model or {})),
        optimizer=Adam() if learns else None, max_grad_norm=MAX_NORM,
        hardware=resolve("hardware", hardware)(PluginConfig(name=hardware)), rank=rank, world_size=world_size, seed=5,
    )  # fmt: skip
    made = MegatronBackend(MegatronConfig(**{"micro_batch_tokens": BUDGET} | options), context)
    made.initialize()
    return made


def batch() -> DataProto:
    """Rows of all lengths, with tokens of an environment and with NaN wherever nothing may look."""
    random = torch.Generator().manual_seed(0)
    ids = torch.zeros(ROWS, PROMPT + RESPONSE, dtype=torch.long)
    real, mask = torch.zeros_like(ids), torch.zeros(ROWS, RESPONSE, dtype=torch.long)
    columns = {name: torch.full((ROWS, RESPONSE), torch.nan) for name in
               ("advantages", "old_log_probs", "ref_log_probs")}  # fmt: skip
    for row in range(ROWS):
        before = int(torch.randint(1, PROMPT + 1, (), generator=random))
        after = int(torch.randint(1, RESPONSE + 1, (), generator=random))
        span = slice(PROMPT - before, PROMPT + after)
        ids[row, span] = torch.randint(3, rig.VOCAB, (before + after,), generator=random)
        real[row, span] = 1
        mask[row, :after] = (torch.rand(after, generator=random) < 0.8).long()
        for name, column in columns.items():
            value = torch.randn(after, generator=random) * 0.3 - 4 * (name != "advantages")
            column[row, :after] = torch.where(mask[row, :after] == 1, value, torch.nan)
    mask[0] = 0  # a row without anything to learn
    return DataProto.from_single_dict({"input_ids": ids, "attention_mask": real, "responses": ids[:, PROMPT:].clone(),
                                       "response_mask": mask, **columns})  # fmt: skip


def paired(data: DataProto) -> DataProto:
    """The same rows as pairs of a better and a worse response."""
    first = torch.tensor([group not in PAIRS[:row] for row, group in enumerate(PAIRS.tolist())])
    return data.with_columns(uid=PAIRS, loss_group=PAIRS, preference=torch.where(first, 1.0, -1.0))


def mini_batch(step: int) -> tuple[DataProto, Counts]:
    """All rows of a step, and what its losses are divided by."""
    data = paired(batch()) if step == 2 else batch()
    return data, Counts.of(data.batch["response_mask"], PAIRS if step == 2 else None)


def mine(data: DataProto, dp: int, size: int) -> DataProto:
    """The rows of a data parallel rank, of which the first has most."""
    first = 8 if "loss_group" in data else 9  # no pair is separated
    return data if size == 1 else data[:first] if dp == 0 else data[first:]


class Expected(NamedTuple):
    """What transformers makes of the batch."""

    log_probs: Tensor
    entropy: Tensor
    losses: list[float]
    norms: list[float]
    after: list[dict[str, Tensor]]  # weights after each step, under the names of a folder

    @property
    def weights(self) -> dict[str, Tensor]:
        """After all steps."""
        return self.after[-1]


def expected(
    folder: Path, *, aux: float = 0.0, z: float = 0.0,
    parts: Callable[[int], Sequence[Sequence[int]]] = lambda step: (range(ROWS),),
) -> Expected:  # fmt: skip
    """Steps of AdamW on padded rows in float32.

    Args:
        aux, z: coefficients of the losses of a mixture's routers.
        parts: the rows of each micro-batch of a step, of which the routers' choices are balanced.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    data = batch()
    real, width = data.batch["attention_mask"], RESPONSE
    mask = data.batch["response_mask"] == 1
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if (p.dim() >= 2) == matrices], "weight_decay": 0.1 * matrices}
         for matrices in (True, False)],
        lr=1e-2, betas=(0.8, 0.9), eps=1e-3,
    )  # fmt: skip
    losses, norms, after, first = [], [], [], None
    for step in range(STEPS):
        data, counts = mini_batch(step)
        asked = {"output_router_logits": True} if aux or z else {}
        output = model(input_ids=data.batch["input_ids"], attention_mask=real, use_cache=False,
                       position_ids=(real.cumsum(1) - 1).clamp(min=0), **asked)  # fmt: skip
        routers = output.router_logits if asked else ()
        log_p = (output.logits[:, -width - 1 : -1] / TEMPERATURE).log_softmax(-1)
        log_probs = log_p.gather(2, data.batch["responses"][:, :, None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        if first is None:
            shown = real[:, -width:] == 1
            first = [torch.where(shown, values.detach(), 0) for values in (log_probs, entropy)]
        inputs = LossInputs(log_probs=torch.where(mask, log_probs, 0), entropy=torch.where(mask, entropy, 0))
        loss = sum(
            term.weight * resolve("policy_losses", term.name)(inputs, data.batch, counts, **term.args).loss
            for term in OBJECTIVES[step]
        )  # fmt: skip
        optimizer.zero_grad()
        (loss + _of_routers(routers, data, parts(step), aux, z)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        losses.append(float(loss.detach()))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * FACTORS[step]
        optimizer.step()
        named = rig._on_disk(dict(model.named_parameters()))
        after.append({name: tensor.detach().clone() for name, tensor in named.items()})
    assert first is not None and max(norms) > MAX_NORM and min(norms) > 0.1
    return Expected(*first, losses, norms, after)


def read(data: DataProto) -> Tokens:
    """The tokens of a batch that an update reads."""
    columns = data.batch
    return Tokens.of(columns["input_ids"], columns["attention_mask"], columns["response_mask"], vocab_size=rig.VOCAB)


def _of_routers(
    routers: Sequence[Tensor], data: DataProto, parts: Sequence[Sequence[int]], aux: float, z: float
) -> Tensor:
    """What is added for the logits of routers, ``(rows * tokens, experts)`` of each layer."""
    real = read(data).read
    total = torch.zeros(())
    for layer in routers:
        for rows in map(list, parts):
            logits = layer.view(*real.shape, -1)[rows][real[rows]]
            tokens, experts = logits.shape
            share = torch.zeros_like(logits).scatter(1, logits.topk(2).indices, 0.5).mean(0)
            balance = experts * (share * logits.softmax(-1).mean(0)).sum()
            squares = logits.exp().sum(-1).log().square().mean()
            total = total + (aux * balance + z * squares) * tokens / int(real.sum())
    return total


def update(made: MegatronBackend, step: int) -> tuple[float, float]:
    """Take a step; its loss and gradient norm."""
    (data, counts), where = mini_batch(step), made.layout
    metrics = made.update(mine(data, where.dp, where.dp_size), OBJECTIVES[step], counts, temperature=TEMPERATURE,
                          lr_factor=FACTORS[step])  # fmt: skip
    assert metrics["lr"].result() == 1e-2 * FACTORS[step]
    everywhere = {"lr", "loss", "grad_norm", "busiest_expert", "balance_loss", "router_z_loss"}
    assert bool(metrics.keys() - everywhere) == (where.pp == where.pp_size - 1)  # those of the terms
    return metrics["loss"].result(), metrics["grad_norm"].result()


def whole_weights(made: MegatronBackend) -> dict[str, Tensor]:
    """What a backend lends."""
    with made.weights(bucket_bytes=3000) as stream:
        return {e.name: e.tensor.clone() for bucket in stream for e in bucket.entries if not e.alias}


def parts(made: MegatronBackend) -> dict[str, list[Tensor]]:
    """What can be in host memory: parameters; moments, and float32 copies of parameters in half precision."""
    parameters = [p.detach() for piece in made.pieces for p in piece.parameters()]
    optimizer: list[Tensor] = []
    for inner in (part.optimizer for part in made.optimizer.parts if part.optimizer is not None):
        optimizer += [v for state in inner.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim()]
        copies = [p.detach() for group in inner.param_groups for p in group["params"]]
        optimizer += copies if parameters[0].dtype != torch.float32 else []
    return {"parameters": parameters, "optimizer": optimizer}


def survive(made: MegatronBackend, moved: Collection[str]) -> bool:
    """Whether some parts go to the host, the others stay, and all are then as they were, bit for bit."""
    before, memory = {name: [t.clone() for t in tensors] for name, tensors in parts(made).items()}, made.memory()
    made.offload(moved)
    made.offload(moved)  # nothing is lost by asking twice
    away = all((tensor.untyped_storage().nbytes() == 0) == (name in moved)
               for name, tensors in parts(made).items() for tensor in tensors)  # fmt: skip
    made.onload(moved)
    made.onload(moved)
    same = all(now.view(torch.uint8).equal(then.view(torch.uint8)) for name, tensors in parts(made).items()
               for now, then in zip(tensors, before[name], strict=True))  # fmt: skip
    return away and same and made.memory() == memory


class Seen(NamedTuple):
    """The largest differences from what was expected, on this rank."""

    outputs: float
    losses: float
    norms: float  # relative
    weights: float
    resumed: bool  # whether steps from a checkpoint are the steps without
    refused: bool  # whether a loss that is not finite changed nothing, on all ranks
    exported: bool  # whether transformers reads what is lent
    ran: list[int]  # micro-batches of each step
    filled: list[int]  # those of them that have rows
    survived: bool  # whether parts come back from the host as they were


def compare(model: Path, aside: Path, wanted: Expected, *, rank: int, world_size: int, **options: Any) -> Seen:
    """Have a backend do all it can."""
    made = backend(model, rank=rank, world_size=world_size, **options)
    data, where = batch(), made.layout
    own = mine(data, where.dp, where.dp_size)
    rows = slice(0, 12) if where.dp_size == 1 else slice(0, 9) if where.dp == 0 else slice(9, 12)
    found = made.forward(own, ("log_probs", "entropy"), temperature=TEMPERATURE)
    outputs = max(float((found[name] - getattr(wanted, name)[rows]).abs().max()) for name in found)
    if where.dp_size > 1:  # one of them without any row
        few = made.forward(own[: 9 * (where.dp == 0)], ("log_probs",), temperature=TEMPERATURE)["log_probs"]
        outputs = max(outputs, float((few - wanted.log_probs[: len(few)]).abs().max()) if len(few) else 0.0)
    steps, after, ran, filled, survived = [], [], [], [], True
    checkpoint = aside / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    for step in range(STEPS):
        with mock.patch.object(pipeline, "run", wraps=pipeline.run) as run:
            steps.append(update(made, step))
        lengths = [lengths for _, lengths in run.call_args.args[1]]
        ran.append(len(lengths))
        filled.append(sum(one != (1,) for one in lengths))
        after.append(whole_weights(made))
        survived = all([survived, *(survive(made, moved) for moved in MOVES)])
        if step == STEPS - 2:
            made.save(checkpoint)
    assert after[0].keys() == wanted.weights.keys() or "lm_head.weight" not in after[0]
    weights = max(float((tensor - wanted.after[step][name]).abs().max())
                  for step, found in enumerate(after) for name, tensor in found.items())  # fmt: skip
    last = after[-1]

    broken = own.with_columns(advantages=torch.full((len(own), RESPONSE), torch.inf if where.dp == 0 else 0.0))
    try:
        counts = Counts.of(data.batch["response_mask"], None)
        made.update(broken, TERMS, counts, temperature=1.0, lr_factor=1.0)
        refused = False
    except NonFiniteError:
        refused = all(tensor.equal(last[name]) for name, tensor in whole_weights(made).items())

    made.export(aside / "exported")
    dist.barrier()
    read = AutoModelForCausalLM.from_pretrained(aside / "exported", dtype=torch.float32)
    theirs = rig._on_disk(dict(read.named_parameters()))
    exported = last.keys() == theirs.keys() and all(theirs[name].equal(tensor) for name, tensor in last.items())
    made.close()

    made = backend(model, rank=rank, world_size=world_size, **options)
    made.load(checkpoint)
    survived = survived and survive(made, MOVES[-1])
    update(made, STEPS - 1)
    resumed = all(tensor.equal(last[name]) for name, tensor in whole_weights(made).items())
    made.close()
    losses = max(abs(loss - right) for (loss, _), right in zip(steps, wanted.losses))
    norms = max(abs(norm / right - 1) for (_, norm), right in zip(steps, wanted.norms))
    return Seen(outputs, losses, norms, weights, resumed, refused, exported, ran, filled, survived)


def work(rank: int, processes: int, folder: Path, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """On each of some processes: every case, with process groups of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{processes}", rank=rank,
                            world_size=processes)  # fmt: skip
    seen = []
    for number, (name, options) in enumerate(cases):
        aside = folder / f"case-{processes}-{number}"
        aside.mkdir(exist_ok=True)
        wanted = torch.load(folder / f"{name}.pt", weights_only=False)
        seen.append(tuple(compare(folder / name, aside, Expected(*wanted), rank=rank, world_size=processes, **options)))
    torch.save(seen, folder / f"seen-{processes}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
