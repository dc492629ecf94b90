"""The reward ``math_verify``."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from drivetrain import PerSample, RewardSample
from drivetrain_tasks.side_process import PREPARATION_S, SideProcess, Stuck

if TYPE_CHECKING:
    from drivetrain_tasks.configs import MathVerifyRewardConfig

logger = logging.getLogger(__name__)

_MARKS = ("$", "\\boxed", "\\(", "\\[")


class MathVerifyReward(PerSample):
    """1 for a response whose final expression equals the answer, else 0.

    The answer is a bare expression, or a text that marks one with ``$``, ``\\(``, ``\\[`` or ``\\boxed``. A response in
    which nothing can be parsed is wrong; an answer in which nothing can be parsed is an error.
    """

    def __init__(self, config: MathVerifyRewardConfig) -> None:
        self._config = config
        self._verifier = SideProcess("drivetrain_tasks.math_answers:verify", {"answer": "1", "response": "1"})

    def judge(self, sample: RewardSample) -> bool:
        if sample.answer is None:
            raise ValueError("the sample has no answer to compare with")
        try:
            parsed = self._verifier.call({"answer": sample.answer}, PREPARATION_S)["parsed"]
        except Stuck as error:
            raise ValueError(f"the answer {sample.answer!r:.200} cannot be parsed: {error}") from error
        if not parsed:
            raise ValueError(f"the answer {sample.answer!r:.200} is no mathematical expression")
        if self._config.require_stop and sample.finish_reason != "stop":
            return False
        try:
            request = {"answer": sample.answer, "response": sample.response}
            return bool(self._verifier.call(request, self._config.sample_timeout_s)["correct"])
        except Stuck as error:
            logger.warning("math_verify: %s for the response %.200r, which counts as wrong", error, sample.response)
            return False


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    # The library's own limits work on the main thread of a process only; here the caller has one.
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


@lru_cache(maxsize=4096)
def _parse_answer(text: str) -> list[Any]:
    found = _parse(text if any(mark in text for mark in _MARKS) else f"${text}$")
    return found if any(not isinstance(part, str) for part in found) else []


def verify(request: dict[str, Any]) -> dict[str, Any]:
    """In the process of its own: whether the answer can be parsed, and with a response, whether it is right."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = _parse_answer(request["answer"])
    if "response" not in request:
        return {"parsed": bool(answer)}
    return {"correct": bool(math_verify.verify(answer, _parse(request["response"]), timeout_seconds=None))}
