"""Tasks of reasoning-gym, and their entries as JSON values from which the same entry can be made again.

A verifier may compare tuples, or look keys up that are no text; plain JSON would turn both into something else.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain import UserError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset


def make_task(task: str, *, seed: int, size: int, args: Mapping[str, Any]) -> ProceduralDataset:
    """The task's dataset. Raises UserError for an unknown task, or settings that it refuses."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=3)
        raise UserError(f"reasoning-gym has no task {task!r}", where="task",
                        mend=f"did you mean {', '.join(close)}?" if close else "see reasoning-gym's list")  # fmt: skip
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **args)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"reasoning-gym's task {task!r} refuses its settings: {error}", where="task_args",
                        mend="mend task_args") from error  # fmt: skip


def to_json(value: Any) -> Any:
    """Like ``value``, of JSON values: tuples and unusual dicts are marked."""
    if isinstance(value, tuple):
        return {"__tuple__": [to_json(item) for item in value]}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {"__items__": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if type(value).__module__ == "numpy":
        return to_json(value.tolist())
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def from_json(value: Any) -> Any:
    """The inverse of :func:`to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(from_json(item) for item in value["__tuple__"])
        if value.keys() == {"__items__"}:
            return {from_json(key): from_json(item) for key, item in value["__items__"]}
        return {key: from_json(item) for key, item in value.items()}
    return value
