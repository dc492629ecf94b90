"""Every error that a user can see: what is wrong, where, and what to do.

``UserError`` is the user's to mend (exit code 2); ``RunError`` is a failure while working (exit code 1).
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.config.base import Problem


class DrivetrainError(Exception):
    """Base of all errors that are shown without a traceback."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", mend: str = "", details: Sequence[tuple[str, str]] = ()) -> None:
        """Compose a message of what is wrong, where (file and key, or a part of the system), and what to do."""
        self.what, self.where, self.mend, self.details = what, where, mend, tuple(details)
        super().__init__(self.message())

    def message(self) -> str:
        """The text that is printed after ``error:``."""
        lines = [f"{self.what} ({self.where})" if self.where else self.what]
        rows = [*self.details, *([("what to do", self.mend)] if self.mend else [])]
        width = max((len(label) for label, _ in rows), default=0)
        lines += [f"  {label.ljust(width)}   {text}" for label, text in rows]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (copyreg.__newobj__, (type(self), *self.args), vars(self))  # type: ignore[attr-defined]


class UserError(DrivetrainError):
    """Something for the user to mend: config, data, plugins, paths."""

    exit_code = 2


class RunError(DrivetrainError):
    """A failure while working."""


class ConfigError(UserError):
    """All that is wrong with a config, at once."""

    def __init__(self, problems: Iterable[tuple[Problem, str]]) -> None:
        """Compose from ``(problem, origin of the value)`` pairs."""
        self.problems = tuple(problems)
        super().__init__(f"{len(self.problems)} problems in the config")

    def message(self) -> str:
        lines = []
        for problem, origin in self.problems:
            lines.append(f"{problem.what} ({f'{origin}: ' if origin else ''}{problem.key})")
            lines += [f"  {line}" for line in problem.mend.splitlines()]
        return "\n".join(lines) if len(self.problems) == 1 else "\n  ".join([self.what, *lines])


class PluginError(UserError):
    """A name that cannot be selected: unknown, in conflict, or from a distribution that does not load."""


class NonFiniteError(RunError):
    """A loss, gradient, reward or log-probability is NaN or infinite; no weight was changed."""


class RewardError(RunError):
    """A reward raised, took too long, or returned something that is no score."""

    def __init__(self, label: str, cause: str, *, sample: str = "") -> None:
        super().__init__(f"reward {label!r} {cause}", details=[("sample", sample)] if sample else [],
                         mend="mend the reward; a failing reward is never counted as zero")  # fmt: skip


class WorkerError(RunError):
    """A call of a worker that raised, was not answered in time, or whose process died; the workers were ended.

    Attributes:
        role, rank, node: which worker; ``call``: the method; ``log``: the last lines of its output.
    """

    def __init__(self, how: str, *, role: str, rank: int, node: str, call: str, log: Sequence[str] = (),
                 log_file: str = "", mend: str = "", exit_code: int = 1) -> None:  # fmt: skip
        self.role, self.rank, self.node, self.call, self.log = role, rank, node, call, tuple(log)
        self.exit_code = exit_code
        lines = [("its log" if number == 0 else "", line) for number, line in enumerate(log)]
        super().__init__(f"{call} {how}", where=f"{role} rank {rank} on {node}", mend=mend,
                         details=[*lines, *([("log file", log_file)] if log_file else [])])  # fmt: skip


class CheckpointError(RunError):
    """A checkpoint that cannot be read or written."""


class WeightStreamError(RunError):
    """A stream of weights with something missing, doubled, changed or of the wrong shape."""


class ExpiredWeightsError(RunError):
    """A weight that was on loan was touched after its context ended."""

    def __init__(self, name: str) -> None:
        super().__init__(f"weight {name!r} was used after the context that lends it ended",
                         mend="copy the tensor inside `with backend.weights(...)`")  # fmt: skip


class InterruptedRun(RunError):
    """The user asked the run to stop; it saved and says how to go on."""

    exit_code = 130
