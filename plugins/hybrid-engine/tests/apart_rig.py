"""Trainers and rollouts in groups of their own, each rank a thread, without a model; and what they do together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from drivetrain import PluginConfig, resolve
from drivetrain.weights import Bucket, WeightEntry, WeightStream, lend
from drivetrain_hybrid_engine.disaggregated import Disaggregated
from drivetrain_hybrid_engine.disaggregated_config import DisaggregatedConfig

NAMES = ("first", "norm", "last")


def context(rank: int, size: int, device: str = "host") -> Any:
    """Of an engine on a device of that name."""
    hardware = resolve("hardware", "cpu")(PluginConfig(name="cpu"))
    hardware.device_uuid = lambda: device
    return SimpleNamespace(rank=rank, world_size=size, hardware=hardware)


class Trainer:
    """Lends weights that hold its rank and a number that training raises."""

    def __init__(self, place: Any) -> None:
        self.config, self.context = SimpleNamespace(name="fsdp"), place
        self.trained, self.fails, self.drawn = 0.0, False, 0

    def value(self) -> Tensor:
        return torch.full((4,), 10.0 * self.context.rank + self.trained)

    def weights(self, *, bucket_bytes: int) -> AbstractContextManager[WeightStream]:
        return lend(self._entries(), bucket_bytes=bucket_bytes)

    def _entries(self) -> Iterator[tuple[str, Tensor, str | None]]:
        for name in NAMES:
            if self.fails and name == "last":
                raise ArithmeticError("no luck")
            self.drawn += 1
            yield name, self.value(), None
        yield "tied", self.value(), "first"


class Rollout:
    """Keeps what it is sent, and notes what it is told."""

    def __init__(self, place: Any) -> None:
        self.config, self.context = SimpleNamespace(name="hf"), place
        self.held: dict[str, Tensor] = {}
        self.calls: list[Any] = []

    def load_weights(self, stream: WeightStream, version: int) -> None:
        self.calls.append(("load", version))
        self.held = {}
        for bucket in stream:
            self.held |= {entry.name: entry.tensor.clone() for entry in bucket.entries if not entry.alias}

    def sleep(self, parts: Any) -> None:
        self.calls.append(("sleep", *parts))

    def wake(self, parts: Any) -> None:
        self.calls.append(("wake", *parts))


class Groups:
    """Engines of all ranks, those that train first; they have met unless ``meet`` is False."""

    def __init__(self, trainers: list[Any], rollouts: list[Any], *, meet: bool = True, **options: Any) -> None:
        self.trainers, self.rollouts = trainers, rollouts
        self.engines = [Disaggregated(DisaggregatedConfig(**options)) for _ in (*trainers, *rollouts)]
        for engine, side in zip(self.engines, (*trainers, *rollouts)):
            engine.attach(*((side, None) if side in trainers else (None, side)))
        self._threads = ThreadPoolExecutor(len(self.engines))
        if meet:
            self.said = self.meet()

    def meet(self) -> list[Any]:
        address, *others = [engine.open() for engine in self.engines[: len(self.trainers)]]
        assert not any(others)
        return self.all(lambda engine: engine.connect(address))

    def all(self, call: Callable[[Disaggregated], Any]) -> list[Any]:
        """What the call gives, or raises, on each rank; all at once."""

        def tried(engine: Disaggregated) -> Any:
            try:
                return call(engine)
            except Exception as error:
                return error

        return list(self._threads.map(tried, self.engines, timeout=100))

    def generate(self, version: int) -> list[Any]:
        return self.all(lambda engine: engine.enter_generation(version))

    def train(self) -> list[Any]:
        return self.all(lambda engine: engine.enter_training())


def fakes(trainers: str = "h", rollouts: str = "h", **options: Any) -> Groups:
    """Groups of ranks without a model, each on the device that a letter names."""
    return Groups(
        [Trainer(context(rank, len(trainers), device)) for rank, device in enumerate(trainers)],
        [Rollout(context(rank, len(rollouts), device)) for rank, device in enumerate(rollouts)], **options,
    )  # fmt: skip


class OnTheWay:
    """A receiving end that changes what comes, entry by entry."""

    def __init__(self, transport: Any, change: Callable[[WeightEntry], list[WeightEntry]]) -> None:
        self.transport, self._change = transport, change

    def receive(self) -> WeightStream:
        return WeightStream(self._buckets(self.transport.receive()))

    def _buckets(self, stream: WeightStream) -> Iterator[Bucket]:
        for bucket in stream:
            yield replace(bucket, entries=tuple(new for entry in bucket.entries for new in self._change(entry)))
