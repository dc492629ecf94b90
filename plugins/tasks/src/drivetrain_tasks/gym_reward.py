"""The reward ``reasoning_gym``."""

from __future__ import annotations

import json
import logging
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from drivetrain import PerSample, RewardSample, Score
from drivetrain_tasks.entries import from_json, make_task
from drivetrain_tasks.side_process import PREPARATION_S, SideProcess, Stuck

if TYPE_CHECKING:
    from drivetrain_tasks.configs import ReasoningGymRewardConfig

logger = logging.getLogger(__name__)


class ReasoningGymReward(PerSample):
    """What the task's own ``score_answer`` says; correct from 1 up.

    A response that the verifier chokes on, though not on the reference, is wrong.
    """

    def __init__(self, config: ReasoningGymRewardConfig) -> None:
        """Raises UserError for a task or settings that reasoning-gym refuses."""
        self._config = config
        if config.task is not None:
            make_task(config.task, seed=0, size=1, args=config.task_args)
        self._verifier = SideProcess("drivetrain_tasks.gym_reward:verify", {})

    def judge(self, sample: RewardSample) -> Score:
        config, extra = self._config, sample.extra
        if config.require_stop and sample.finish_reason != "stop":
            return Score(0.0, correct=False)
        task = config.task or extra.get("task")
        if task is None or "metadata" not in extra:
            raise ValueError("the sample has no reasoning-gym entry; take the dataset reasoning_gym")
        answer: str | None = sample.response.strip()
        if config.answer_pattern is not None:
            found = list(re.finditer(config.answer_pattern, sample.response, re.DOTALL))
            answer = found[-1].group(1) if found else None
        request = {"task": task, "args": config.task_args if config.task else extra.get("task_args", {})}
        self._verifier.call(request, PREPARATION_S)
        entry = {"question": extra["question"], "answer": sample.answer, "metadata": extra["metadata"]}
        request |= {"answer": answer, "entry": entry}
        try:
            value = float(self._verifier.call(request, config.sample_timeout_s)["score"])
        except Stuck as error:
            logger.warning("reasoning_gym: %s for the response %.200r, which counts as wrong", error, answer)
            value = 0.0
        return Score(value, correct=value >= 1)


@lru_cache(maxsize=64)
def _task(task: str, args: str) -> Any:
    return make_task(task, seed=0, size=1, args=json.loads(args))


def verify(request: dict[str, Any]) -> dict[str, Any]:
    """In the process of its own: ``{"score": ...}``; without an entry, get the task ready for one."""
    if "task" not in request:
        import reasoning_gym  # noqa: F401

        return {}
    task = _task(request["task"], json.dumps(request["args"], sort_keys=True))
    if "entry" not in request:
        return {}
    entry = from_json(request["entry"])
    try:
        score = task.score_answer(request["answer"], entry)
    except Exception:
        task.score_answer(entry["answer"], entry)  # raises if the entry is at fault
        score = 0.0
    return {"score": float(score)}
