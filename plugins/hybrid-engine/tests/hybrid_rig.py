"""A tiny model, a trainer and a rollout for it, coupled by the hybrid engine; and what one step does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain import (
    BackendContext,
    Completion,
    DataProto,
    GenerationRequest,
    LossTerm,
    ModelConfig,
    PluginConfig,
    RolloutContext,
    SamplingParams,
    resolve,
)
from drivetrain.numerics import Counts, group_index
from drivetrain.weights import Bucket, WeightEntry, WeightStream
from drivetrain_hybrid_engine.colocated import Colocated
from drivetrain_hybrid_engine.config import ColocatedConfig

transformers.logging.set_verbosity_error()

RESPONSE = 6
NORM = "model.norm.weight"


def write_model(folder: Path, *, tied: bool) -> Path:
    """A random Llama; its weights are large, so that its distributions are far from uniform."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Journal:
    """What reaches the two engines, in order; what is to fail does so once, before anything is done."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.failing: set[str] = set()

    def note(self, *words: str) -> None:
        event = " ".join(words)
        self.events.append(event)
        if event in self.failing:
            self.failing.remove(event)
            raise RuntimeError(f"{event} failed")

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events


def watched(backend: type, rollout: type, journal: Journal) -> tuple[type, type]:
    """The two engines, with a journal; the rollout sleeps, and its weights are lost in sleep."""

    class Backend(backend):  # type: ignore[misc,valid-type]
        def offload(self, parts: Collection[str]) -> None:
            journal.note("offload", *sorted(parts))
            super().offload(parts)

        def onload(self, parts: Collection[str]) -> None:
            journal.note("onload", *sorted(parts))
            super().onload(parts)

        @contextmanager
        def weights(self, **options: Any) -> Iterator[WeightStream]:
            with super().weights(**options) as stream:

                def buckets() -> Iterator[Bucket]:
                    journal.note("gather")
                    yield from stream

                yield WeightStream(buckets())

    class Rollout(rollout):  # type: ignore[misc,valid-type]
        def load_weights(self, stream: WeightStream, version: int) -> None:
            journal.note("load")
            super().load_weights(stream, version)

        def sleep(self, parts: Collection[str] = ()) -> None:
            journal.note("sleep", *parts)
            if "weights" in parts:
                for tensor in self._own_or_attached().state_dict().values():
                    tensor.fill_(float("nan"))

        def wake(self, parts: Collection[str] = ()) -> None:
            journal.note("wake", *parts)

        def generate_batch(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
            journal.note("generate")
            return super().generate_batch(requests)

    return Backend, Rollout


class Pair:
    """A trainer and a rollout of one process; with a journal they are :func:`watched`."""

    def __init__(
        self, folder: Path, *, rank: int = 0, world_size: int = 1, journal: Journal | None = None,
        moves: Collection[str] = (), attach: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        hardware = resolve("hardware", "cpu")(PluginConfig(name="cpu"))
        place: Any = {"model": ModelConfig(path=folder), "hardware": hardware, "rank": rank,
                      "world_size": world_size, "seed": 5}  # fmt: skip
        from drivetrain_backend_fsdp.config import AdamWConfig, FSDPConfig
        from drivetrain_rollout_hf.config import HFRolloutConfig

        backend, rollout = resolve("backends", "fsdp"), resolve("rollouts", "hf")
        if journal is not None:
            backend, rollout = watched(backend, rollout, journal)
        self.backend = backend(
            FSDPConfig(**{f"{part}_offload": True for part in moves}),
            BackendContext(role="actor", optimizer=AdamWConfig(lr=1e-2, eps=1e-3), max_grad_norm=1.0, **place),
        )
        self.backend.initialize()
        self.rollout = rollout(HFRolloutConfig(name="hf", max_response_tokens=RESPONSE), RolloutContext(**place))
        self.hybrid = Colocated(ColocatedConfig(**options))
        if attach:
            self.hybrid.attach(self.backend, self.rollout)
        self.rollout.initialize()

    def held(self) -> dict[str, Tensor]:
        """Copies of the weights that generate."""
        return {name: tensor.clone() for name, tensor in self.rollout._module.state_dict().items()}

    def trained(self) -> dict[str, Tensor]:
        """Copies of the weights that train, as they leave; a collective call."""
        with self.backend.weights(bucket_bytes=10_000) as stream:
            entries = [entry for bucket in stream for entry in bucket.entries]
            mine = {entry.name: entry.tensor.clone() for entry in entries if not entry.alias}
            return mine | {entry.name: mine[entry.alias] for entry in entries if entry.alias}

    def generate(self, prompts: list[tuple[int, ...]]) -> list[Completion]:
        """Two samples of each prompt."""
        sampling = SamplingParams(max_tokens=RESPONSE)
        requests = [
            GenerationRequest(request_id=str(n), prompt_token_ids=prompt, seeds=(11 + n, 12 + n), sampling=sampling)
            for n, prompt in enumerate(prompts)
        ]
        return [completion for group in self.rollout.generate_batch(requests) for completion in group]

    def mismatch(self, prompts: list[tuple[int, ...]]) -> tuple[DataProto, float]:
        """Samples, and the largest distance of their log-probs by the rollout and by the trainer; collective."""
        batch = as_batch(prompts, self.generate(prompts))
        ours = self.backend.forward(batch, ["log_probs"], temperature=1.0)["log_probs"]
        mask = batch.batch["response_mask"] == 1
        return batch, float((ours - batch.batch["old_log_probs"])[mask].abs().max())

    def update(self, batch: DataProto, whole: DataProto | None = None) -> None:
        """One optimizer step on this rank's rows of a batch."""
        whole = batch if whole is None else whole
        counts = Counts.of(whole.batch["response_mask"], group_index(whole["uid"].tolist()))
        terms = (LossTerm(name="clip", args={"clip_low": 0.2, "clip_high": 0.2}),)
        self.backend.update(batch, terms, counts, temperature=1.0, lr_factor=1.0)


def as_batch(prompts: list[tuple[int, ...]], completions: list[Completion]) -> DataProto:
    """Rows with a made-up advantage; prompts are of one length."""
    rows, width = len(completions), len(prompts[0])
    ids = torch.zeros(rows, width + RESPONSE, dtype=torch.long)
    real, log_probs = torch.zeros_like(ids), torch.zeros(rows, RESPONSE)
    for row, completion in enumerate(completions):
        ids[row, :width] = torch.tensor(prompts[row // 2])
        length = len(completion.token_ids)
        ids[row, width : width + length] = torch.tensor(completion.token_ids)
        real[row, : width + length] = 1
        log_probs[row, :length] = torch.tensor(completion.log_probs)
    return DataProto.from_single_dict(
        {
            "input_ids": ids, "attention_mask": real, "responses": ids[:, width:].clone(),
            "response_mask": real[:, width:].clone(), "old_log_probs": log_probs,
            "advantages": torch.linspace(-1, 1, rows)[:, None].expand(rows, RESPONSE).clone(),
            "uid": [f"p{row // 2}" for row in range(rows)],
        }
    )  # fmt: skip


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal names and equal bits."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].equal(tensor), name


Entries = Callable[[WeightEntry], list[WeightEntry]]


class Faulty:
    """A transport that does something to one weight on the way."""

    def __init__(self, change: Entries) -> None:
        self._change = change

    def send(self, stream: WeightStream) -> None:
        self._stream = stream

    def receive(self) -> WeightStream:
        return WeightStream(self._buckets())

    def _buckets(self) -> Iterator[Bucket]:
        for bucket in self._stream:
            entries = [new for entry in bucket.entries for new in self._change(entry)]
            yield replace(bucket, entries=tuple(entries))


def flipped(entry: WeightEntry) -> list[WeightEntry]:
    """The last bit of one number of the last norm is another one."""
    if entry.name != NORM:
        return [entry]
    tensor = entry.tensor.clone()
    tensor[3] = torch.nextafter(tensor[3], torch.tensor(99.0))
    return [replace(entry, _tensor=tensor)]
