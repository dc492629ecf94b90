"""What a judge is shown, and what is read from what it says."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from drivetrain_judges.configs import PLACEHOLDER

if TYPE_CHECKING:
    from drivetrain import RewardSample
    from drivetrain_judges.configs import EndpointConfig


class NoAnswer(Exception):
    """The template shows the reference, and the sample has none."""


def fill(template: str, sample: RewardSample, **values: str) -> str:
    """The template with its placeholders replaced, once: braces in a response stay as they are.

    A prompt of chat messages is shown as their contents, not with the marks of the policy's chat template.

    Raises:
        NoAnswer: the template has ``{answer}`` and the sample has no reference.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name == "answer":
            if sample.answer is None:
                raise NoAnswer("the template shows {answer}, and the sample has none; take {answer} out of it, or give "
                               "every prompt an answer")  # fmt: skip
            return sample.answer
        return _prompt(sample) if name == "prompt" else values[name]

    return PLACEHOLDER.sub(value, template)


def _prompt(sample: RewardSample) -> str:
    if not sample.messages:
        return sample.prompt
    if len(sample.messages) == 1:
        return sample.messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in sample.messages)


def find_verdict(said: str, config: EndpointConfig) -> str | None:
    """What ``json_key`` or ``pattern`` marks in what a judge said, the last time; None if nothing."""
    if config.json_key is not None:
        values = [found[config.json_key] for found in _objects(said) if config.json_key in found]
        return str(values[-1]) if values else None
    matches = list(re.finditer(config.pattern or config.default_pattern, said, re.DOTALL))
    return matches[-1][1] if matches else None


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, in order; one within another is not looked at."""
    found, at, decoder = [], text.find("{"), json.JSONDecoder()
    while at >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
            found.append(value)
        except ValueError:
            at += 1
        at = text.find("{", at)
    return found
