"""The reward ``llm_preference``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from drivetrain import RewardSample, SampleError, Score
from drivetrain_judges.endpoint import Endpoint
from drivetrain_judges.texts import NoAnswer, fill

if TYPE_CHECKING:
    from drivetrain_judges.configs import LLMPreferenceConfig

VERDICTS = {"a": 1.0, "b": 0.0, "tie": 0.5}  # how often the response that is shown first wins


class LLMPreference:
    """How often a sample wins against the K samples of its prompt, itself among them, by a model that compares pairs::

        P(y_i > pi) = (1/K) sum_k P(y_i > y_k),     P(y_i > y_i) = 1/2

    the estimate of SPPO (arXiv 2405.00675). P(y_i > y_k) is the mean of two verdicts, y_i shown first and y_k shown
    first; a win is 1, a tie 1/2. Equal responses tie without being asked about. With ``opponents`` = m < K - 1 the
    samples of a prompt stand in a circle drawn from ``seed`` and uid, and each meets the m nearest; the mean over these
    stands for that over all K - 1 others. One sample by itself has 1/2. Right and wrong are not judged.
    """

    def __init__(self, config: LLMPreferenceConfig) -> None:
        """Raises UserError when the API key is not in the environment."""
        self._config, self._endpoint = config, Endpoint(config, lambda verdict: VERDICTS.get(verdict.strip().lower()))

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        """One win probability in [0, 1] a sample, in order. Raises SampleError by JudgeError."""
        prompts: dict[str, list[int]] = {}
        for index, sample in enumerate(samples):
            prompts.setdefault(sample.uid, []).append(index)
        pairs = [pair for uid, rows in prompts.items() for pair in self._pairs(uid, rows)]
        orders = [order for i, k in pairs for order in ((i, k), (k, i)) if samples[i].response != samples[k].response]
        texts = [self._text(samples, first, second) for first, second in orders]
        shown_first = dict(zip(orders, self._endpoint.ask(texts, [first for first, _ in orders]), strict=True))
        wins: list[list[float]] = [[] for _ in samples]
        for i, k in pairs:
            win = (shown_first[i, k] + 1 - shown_first[k, i]) / 2 if (i, k) in shown_first else 0.5
            wins[i].append(win)
            wins[k].append(1 - win)
        sizes = [len(prompts[sample.uid]) for sample in samples]
        return [
            Score((0.5 + (size - 1) * sum(own) / len(own)) / size if own else 0.5) for own, size in zip(wins, sizes)
        ]

    def _pairs(self, uid: str, rows: list[int]) -> Iterator[tuple[int, int]]:
        """Who is compared with whom, each pair once."""
        size, opponents = len(rows), self._config.opponents
        if opponents is None or opponents >= size - 1:
            yield from itertools.combinations(rows, 2)
            return
        circle = random.Random(f"{self._config.seed} {uid}").sample(rows, size)
        for at, step in itertools.product(range(size), range(1, opponents // 2 + 1)):
            yield circle[at], circle[(at + step) % size]

    def _text(self, samples: Sequence[RewardSample], first: int, second: int) -> str:
        try:
            return fill(self._config.template, samples[first], response_a=samples[first].response,
                        response_b=samples[second].response)  # fmt: skip
        except NoAnswer as error:
            raise SampleError(first) from error
