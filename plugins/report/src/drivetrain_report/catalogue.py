"""The metrics that the views know by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drivetrain_report.numbers import number, percent, seconds

# phases of a step in their order, with the numbers of their colours; what is left of a step is "other"
PHASES = {
    "generate": 0, "reward": 1, "log_probs": 7, "ref_log_probs": 8, "values": 9, "update_critic": 10, "update": 2,
    "evaluate": 3, "sync": 4, "save": 5,
}  # fmt: skip
OTHER_COLOR = 6
BESIDES_STEP = ("evaluate", "save")  # phases that time/step_s leaves out


@dataclass(frozen=True)
class Measure:
    """How a metric is drawn.

    Attributes:
        title: name for people.
        unit: unit, always said beside the title.
        text: how a value is written.
        floor: the lowest value that the axis reaches down to, None to fit the data.
        ceiling: the least upper end of the axis, None to fit the data.
    """

    title: str
    unit: str
    text: Callable[[float], str] = number
    floor: float | None = None
    ceiling: float | None = None


REWARD = Measure("Reward", "mean score of a completion")
ACCURACY = Measure("Accuracy", "% of completions that are right", percent, floor=0.0, ceiling=1.0)

DYNAMICS = {
    "train/response_tokens": Measure("Response length", "tokens, mean", floor=0.0),
    "train/kl": Measure("KL to the reference", "nats a token", floor=0.0),
    "train/entropy": Measure("Entropy", "nats a token", floor=0.0),
    "train/grad_norm": Measure("Gradient norm", "2-norm, before clipping", floor=0.0),
    "train/clip_fraction": Measure("Clipped", "% of tokens", percent, floor=0.0),
    "throughput/tokens_per_s": Measure("Throughput", "tokens a second", floor=0.0),
}

KNOWN_UNITS: dict[str, tuple[str, Callable[[float], str]]] = {
    "train/loss": ("no unit", number),
    "train/lr": ("learning rate", number),
    "train/response_tokens_max": ("tokens", number),
    "train/truncated": ("% of completions", percent),
}


def further(name: str) -> Measure:
    """A metric that is not in the catalogue, under its own name."""
    short = name.removeprefix("train/")
    if name in KNOWN_UNITS:
        return Measure(short, *KNOWN_UNITS[name])
    if name.endswith("_per_s"):
        return Measure(short, "a second")
    if name.endswith("_s"):
        return Measure(short, "seconds", seconds)
    if name.endswith(("_fraction", "accuracy")):
        return Measure(short, "%", percent)
    if name.endswith("_tokens"):
        return Measure(short, "tokens")
    if name.endswith("_bytes"):
        return Measure(short, "bytes")
    return Measure(short, "as logged")
