"""What a config and a plan say about a run, for headers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any


def config_values(config: Any) -> dict[str, Any]:
    """The config as plain values, empty if it has none."""
    dump = getattr(config, "model_dump", None)
    values = dump(mode="json") if dump else config
    return dict(values) if isinstance(values, Mapping) else {}


def look_up(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, None where the config lacks it."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def planned_steps(config: Mapping[str, Any]) -> int | None:
    """Steps of the whole run."""
    steps = look_up(config, "trainer.steps")
    return steps if isinstance(steps, int) else None


def title(config: Mapping[str, Any], otherwise: str = "run") -> str:
    """Algorithm and model, such as ``grpo on tiny-llama``, as far as the config names them."""
    algorithm, model = look_up(config, "algorithm.name"), look_up(config, "model.path")
    name = PurePath(str(model)).name if model else ""
    return f"{algorithm or 'training'} on {name}" if name else str(algorithm or otherwise)


def header_facts(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labelled choices of the run, those that the config makes."""
    keys = {
        "algorithm": "algorithm.name",
        "model": "model.path",
        "backend": "actor.backend.name",
        "rollout": "rollout.name",
        "executor": "executor.name",
        "hardware": "hardware.name",
        "seed": "trainer.seed",
    }
    found = {label: look_up(config, key) for label, key in keys.items()}
    return [(label, str(value)) for label, value in found.items() if value is not None]


def plan_line(plan: Mapping[str, int | str]) -> str:
    """The sizes of a step: ``300 steps of 32 prompts x 8 samples = 256 sequences; mini-batches 1``."""
    rest = dict(plan)
    parts = []
    samples = next((key for key in ("samples", "group_size") if key in plan), None)
    if samples and {"prompts", "sequences"} <= plan.keys():
        prompts, each, sequences = rest.pop("prompts"), rest.pop(samples), rest.pop("sequences")
        steps = f"{rest.pop('steps')} steps of " if "steps" in rest else ""
        parts.append(f"{steps}{prompts} prompts x {each} samples = {sequences} sequences")
    parts += [f"{key.replace('_', '-')} {value}" for key, value in rest.items()]
    return "; ".join(parts)
