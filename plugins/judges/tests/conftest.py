"""A judge server, and samples for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from judge_server import Answer, JudgeServer, serving

from drivetrain import RewardSample


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], tuple[str, JudgeServer]]]:
    """Starts a server; it ends with the test."""
    with ExitStack() as stack:
        yield lambda answer: stack.enter_context(serving(answer))


@pytest.fixture(scope="session")
def sample() -> Callable[..., RewardSample]:
    def make(response: str, *, uid: str = "0", **fields: Any) -> RewardSample:
        given = {"prompt": "p", "answer": None, "finish_reason": "stop", "data_source": "s", **fields}
        return RewardSample(response=response, uid=uid, response_token_ids=(5,), **given)

    return make
