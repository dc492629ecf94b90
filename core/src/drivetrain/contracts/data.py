"""The contracts of prompts and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One item of a dataset.

    Attributes:
        prompt: text, or chat messages with ``role`` and ``content``.
        answer: the reference that rewards compare with.
        response: a text to imitate, for supervised training.
        data_source: where the item is from; evaluation reports each source by itself.
        extra: whatever else a reward needs, as JSON values.
    """

    prompt: str | Sequence[Message]
    answer: str | None = None
    response: str | None = None
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


class Dataset(Protocol):
    """Examples by index. The same config gives the same examples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """One completion to be judged.

    Attributes:
        prompt: the prompt as text, the template applied.
        response: the completion as text, special tokens left out.
        response_token_ids: the completion as the policy drew it.
        finish_reason: ``stop``, ``length`` or ``abort``.
        answer, data_source, extra: as in :class:`Example`.
    """

    prompt: str
    response: str
    response_token_ids: Sequence[int]
    finish_reason: str
    answer: str | None
    data_source: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """A judgement.

    Attributes:
        value: the reward.
        correct: whether the answer is right, for ``eval/accuracy``; None when the reward judges something else.
    """

    value: float
    correct: bool | None = None


class Reward(Protocol):
    """Judges completions. An error is raised, never turned into a score."""

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[Score]:
        """One score a sample, in order."""
