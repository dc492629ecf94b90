"""A trainer and vLLM in one process, coupled by the hybrid engine that sends weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rig_vllm import ATOL, Served, furthest, prompts, request

from drivetrain import BackendContext, RunError, WeightStreamError, resolve
from drivetrain.weights import Bucket, WeightStream
from drivetrain_hybrid_engine.colocated import Colocated
from drivetrain_hybrid_engine.config import ColocatedConfig
from drivetrain_hybrid_engine.in_process import InProcess


class Flipping(InProcess):
    """The last bit of one number of the last norm is another one when it arrives."""

    def receive(self) -> WeightStream:
        return WeightStream(self._flipped(super().receive()))

    def _flipped(self, stream: WeightStream) -> Iterator[Bucket]:
        for bucket in stream:
            entries = list(bucket.entries)
            for at, entry in enumerate(entries):
                if entry.name == "model.norm.weight":
                    tensor = entry.tensor.clone()
                    tensor[3] = torch.nextafter(tensor[3], torch.tensor(99.0))
                    entries[at] = replace(entry, _tensor=tensor)
            yield replace(bucket, entries=tuple(entries))


def coupled(served: Served) -> tuple[Any, Colocated]:
    """A trainer of the same model, and the coupling."""
    from drivetrain_backend_fsdp.config import AdamWConfig, FSDPConfig

    context = served.engine.context
    backend = resolve("backends", "fsdp")(
        FSDPConfig(),
        BackendContext(role="actor", optimizer=AdamWConfig(lr=1e-2), max_grad_norm=1.0, model=context.model,
                       hardware=context.hardware, rank=0, world_size=1, seed=5),
    )  # fmt: skip
    backend.initialize()
    hybrid = Colocated(ColocatedConfig(bucket_bytes=30_000, fingerprint="always"))
    hybrid.attach(backend, served.engine)
    return backend, hybrid


def assert_generates_as(backend: Any, served: Served) -> None:
    """With the weights that the trainer has."""
    asked = [request(row, str(at), (1, 2), max_tokens=12) for at, row in enumerate(prompts(6))]
    assert furthest(backend.model, asked, served.engine.generate_batch(asked)) < ATOL


def test_every_sync_brings_the_trainers_weights(served: Served) -> None:
    backend, hybrid = coupled(served)
    for version in range(3):
        told = hybrid.enter_generation(version)
        assert told["bytes"] > 0 and told["buckets"] > 3
        assert hybrid.enter_generation(version) == {}, "it is up to date"
        assert_generates_as(backend, served)
        hybrid.enter_training()
        with pytest.raises(RunError, match="cannot generate"):
            served.draw([5])
        with torch.no_grad():
            for parameter in backend.model.parameters():
                parameter.mul_(1.05).add_(0.01)


def test_a_flipped_bit_is_noticed_and_not_generated_with(served: Served) -> None:
    backend, hybrid = coupled(served)
    hybrid.enter_generation(0)
    good, hybrid.transport = hybrid.transport, Flipping()
    for _ in range(2):
        with pytest.raises(WeightStreamError, match="'model.norm.weight' did not arrive as it left"):
            hybrid.enter_generation(1)
        with pytest.raises(RunError, match="the load of weights of version 1 did not succeed"):
            served.draw([5])
    hybrid.transport = good
    hybrid.enter_generation(1)
    assert_generates_as(backend, served)
