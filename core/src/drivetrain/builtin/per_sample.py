"""A base class for rewards that judge each sample by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.contracts.data import RewardSample, Score


class SampleError(Exception):
    """Judging one sample failed; ``__cause__`` says why.

    Attributes:
        index: position of the sample in the call.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"sample {index}")
        self.index = index


class PerSample(ABC):
    """A reward that loops over the samples; what :meth:`judge` raises is reported with the sample it was judging."""

    @abstractmethod
    def judge(self, sample: RewardSample) -> Score | float:
        """Judge one sample. A bool is a judgement of correctness: 1 for right, 0 for wrong."""

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score | float]:
        """One judgement a sample, in order."""
        scores = []
        for index, sample in enumerate(samples):
            try:
                scores.append(self.judge(sample))
            except Exception as error:
                raise SampleError(index) from error
        return scores
