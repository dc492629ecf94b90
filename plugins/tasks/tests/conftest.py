"""A sample to judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain import RewardSample

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def gsm8k_file() -> Path:
    return DATA / "gsm8k.jsonl"


@pytest.fixture(scope="session")
def sample() -> Callable[..., RewardSample]:
    def make(response: str, answer: str | None = None, *, finish_reason: str = "stop", tokens: int = 3,
             extra: Any = None) -> RewardSample:  # fmt: skip
        return RewardSample(prompt="p", uid="0", response=response, response_token_ids=(5,) * tokens, answer=answer,
                            finish_reason=finish_reason, data_source="s", extra=extra or {})  # fmt: skip

    return make
