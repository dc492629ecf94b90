"""Plain lines, for logs and pipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from drivetrain import RunInfo
from drivetrain_report.facts import plan_line
from drivetrain_report.numbers import number, plain, score, seconds

FIELDS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("train/reward", lambda v: f"reward {score(v)}"),
    ("eval/accuracy", lambda v: f"accuracy {score(v)}"),
    ("train/response_tokens", lambda v: f"response {number(v)} tokens"),
    ("train/loss", lambda v: f"loss {number(v)}"),
    ("train/kl", lambda v: f"kl {number(v)}"),
    ("train/approx_kl", lambda v: f"approx_kl {number(v)}"),
    ("train/entropy", lambda v: f"entropy {number(v)}"),
    ("throughput/tokens_per_s", lambda v: f"{number(v)} tok/s"),
    ("time/step_s", seconds),
)


def start_line(info: RunInfo) -> str:
    """The plan and the notes on one line."""
    parts = [f"plan: {plan_line(info.plan)}"] if info.plan else []
    parts += [plain(note) for note in info.notes]
    return " | ".join(parts)


def step_line(step: int, steps_planned: int | None, metrics: Mapping[str, float]) -> str:
    """What a step has measured, such as ``step 12/300  reward 0.412  1,234 tok/s  0.52 s``."""
    parts = [f"step {step}/{steps_planned}" if steps_planned else f"step {step}"]
    parts += [text(metrics[name]) for name, text in FIELDS if name in metrics]
    return "  ".join(parts)
