"""Where a run stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Where the run stands.

    Attributes:
        step: the step under way, from 1; 0 before the first.
        updates: optimizer steps of the actor so far, which is the version of its weights.
    """

    step: int = 0
    updates: int = 0
