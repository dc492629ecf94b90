"""The contracts of prompts and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One item of a dataset."""

    prompt: str | Sequence[Message]  # text, or chat messages with role and content
    answer: str | None = None  # what rewards compare with
    response: str | None = None  # a text to imitate, for supervised training; of a preference pair the better one
    rejected: str | None = None  # the worse response of a preference pair
    data_source: str = ""  # evaluation reports each source by itself
    extra: Mapping[str, Any] = field(default_factory=dict)  # whatever else a reward needs, as JSON values


class Dataset(Protocol):
    """Examples by index. The same config gives the same examples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """One completion to be judged, with what its :class:`Example` says."""

    uid: str  # the prompt's: samples of one prompt share it
    prompt: str  # as text, the template applied
    messages: Sequence[Message] | None = None  # the prompt before a chat template was applied; None if none was
    response: str  # as text, special tokens left out
    response_token_ids: Sequence[int]  # as the policy drew them
    finish_reason: str  # stop, length or abort
    answer: str | None
    data_source: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """A judgement."""

    value: float
    correct: bool | None = None  # whether the answer is right, for eval/accuracy; None: something else was judged


class Reward(Protocol):
    """Judges completions. An error is raised, never turned into a score."""

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[Score]:
        """One score a sample, in order."""
