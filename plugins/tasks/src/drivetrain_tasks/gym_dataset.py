"""The dataset ``reasoning_gym``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from drivetrain import Example, UserError
from drivetrain_tasks.entries import make_task, to_json

if TYPE_CHECKING:
    from drivetrain_tasks.configs import ReasoningGymConfig


class ReasoningGymDataset:
    """Items of a procedural task, made when they are asked for.

    ``response`` is the answer, for supervised training. ``extra`` is what the task's verifier needs: ``task``,
    ``task_args``, ``question`` and ``metadata``.
    """

    def __init__(self, config: ReasoningGymConfig) -> None:
        """Raises UserError for settings that reasoning-gym refuses, and when ``disjoint_from`` leaves none."""
        self._config = config
        self._items = make_task(config.task, seed=config.seed, size=config.size, args=config.task_args)
        self._indices = list(range(config.size))
        if other := config.disjoint_from:
            held_out = make_task(config.task, seed=other.seed, size=other.size, args=config.task_args)
            taken = {self._prompt(held_out[index], index) for index in range(other.size)}
            self._indices = [index for index in self._indices if self._prompt(self._items[index], index) not in taken]
            if not self._indices:
                raise UserError(f"all {config.size} prompts of task {config.task!r} occur in disjoint_from too",
                                where="disjoint_from", mend="draw from a larger range with task_args")  # fmt: skip

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Example:
        number = self._indices[index]
        item = self._items[number]
        extra = {"task": self._config.task, "task_args": self._config.task_args,
                 "question": item["question"], "metadata": to_json(item["metadata"])}  # fmt: skip
        return Example(prompt=self._prompt(item, number), answer=item["answer"], response=item["answer"],
                       data_source=self._config.task, extra=extra)  # fmt: skip

    def _prompt(self, item: dict[str, Any], index: int) -> str:
        text: str = item["question"]
        if pattern := self._config.prompt_pattern:
            match = re.search(pattern, text)
            if match is None or match.group(1) is None:
                raise UserError(f"prompt_pattern matches nothing in item {index} of task {self._config.task!r}",
                                where="prompt_pattern", details=[("question", f"{text!r:.200}")],
                                mend="mend the pattern, or leave it out")  # fmt: skip
            text = match.group(1)
        return "".join(text.split()) if self._config.strip_spaces else text
