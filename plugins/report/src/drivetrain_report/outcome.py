"""How a run went, kept in ``report.json`` so that the page can be written anew."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from drivetrain_report.writing import write_aside

FILE = "report.json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What metrics do not say about a run.

    Attributes:
        status: ``running`` until the run has ended; empty if it is not known.
        wall_s: wall time of all ended sessions of the run.
        first_step: the first step of the last session.
        ended_at: local date and time.
    """

    status: str = ""
    error: str | None = None
    steps_done: int = 0
    steps_planned: int | None = None
    wall_s: float = 0.0
    first_step: int = 1
    ended_at: str = ""
    notes: Sequence[str] = ()
    plan: Mapping[str, int | str] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path) -> Outcome:
        """What the folder says; an outcome without a status if it says nothing."""
        try:
            values = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
            known = {f.name for f in fields(cls)}
            return cls(**{key: value for key, value in values.items() if key in known})
        except (OSError, ValueError, AttributeError):
            return cls()

    def write(self, run_dir: Path) -> None:
        """Keep it in the folder."""
        write_aside(run_dir / FILE, json.dumps(asdict(self), indent=2) + "\n")
