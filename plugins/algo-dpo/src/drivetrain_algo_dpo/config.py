"""The settings of DPO and online DPO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import Field

from drivetrain import AlgorithmConfig, Problem, RecordConfig, RunConfig
from drivetrain.seam.registry import Registry


class PairConfig(AlgorithmConfig):
    """What all algorithms of pairs share."""

    beta: float = Field(0.1, gt=0, description="Strength of the tie to the frozen side.")
    epochs: int = Field(1, ge=1, description="Passes over a batch.")

    def loss_options(self) -> dict[str, Any]:
        """Keyword arguments of the loss ``dpo``."""
        return {"beta": self.beta}


class PairLossConfig(PairConfig):
    """What both algorithms of this package share."""

    beta: float = Field(0.1, gt=0, description="Strength of the tie to the reference; tau of ipo.")
    kind: Literal["sigmoid", "ipo", "hinge"] = Field("sigmoid", description="Loss of a pair's margin.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs that are taken to be the wrong way round; for sigmoid alone."
    )

    def loss_options(self) -> dict[str, Any]:
        return {"beta": self.beta, "kind": self.kind, "label_smoothing": self.label_smoothing}

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        if self.label_smoothing and self.kind != "sigmoid":
            yield Problem(key="label_smoothing", what=f"the loss {self.kind!r} does not read it", mend="remove it")


class DPOConfig(PairLossConfig):
    """The section ``algorithm`` when its name is ``dpo``."""

    def roles(self) -> tuple[str, ...]:
        return ("actor", "ref")

    def samples_per_prompt(self) -> int:
        return 2

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        yield from super().check(run, registry)
        yield from missing_keys(run, "response_key", "rejected_key")


class OnlineDPOConfig(PairLossConfig):
    """The section ``algorithm`` when its name is ``online_dpo``."""

    group_size: int = Field(2, ge=2, description="Samples of a prompt, of which the best and the worst are compared.")
    reference: Literal["start", "policy"] = Field(
        "start", description="The frozen model that the run started from, or the policy that drew the samples."
    )

    def roles(self) -> tuple[str, ...]:
        return ("actor", "ref") if self.reference == "start" else ("actor",)

    def samples_per_prompt(self) -> int:
        return self.group_size

    def check(self, run: RunConfig, registry: Registry) -> Iterable[Problem]:
        yield from super().check(run, registry)
        if run.rollout is not None and run.rollout.temperature == 0:
            yield Problem(key="group_size", what="greedy sampling draws every sample of a prompt alike",
                          mend="raise rollout.temperature above 0")  # fmt: skip


def missing_keys(run: RunConfig, *keys: str) -> Iterator[Problem]:
    """Yield a problem for each key of texts to learn from that a dataset of records does not name."""
    for key in keys:
        if isinstance(run.data.train, RecordConfig) and getattr(run.data.train, key) is None:
            yield Problem(key="name", what=f"algorithm {run.algorithm.name!r} learns from texts that data.train does "
                          f"not name: {key} is not set", mend=f"set data.train.{key}")  # fmt: skip
