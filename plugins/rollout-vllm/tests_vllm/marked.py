"""The rollout ``marked``: vLLM's, which leaves a file named by its process when it begins to generate."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from drivetrain import RolloutSpec, hookimpl
from drivetrain_rollout_vllm.config import VLLMRolloutConfig


class MarkedConfig(VLLMRolloutConfig):
    """The section of ``marked``."""

    folder: Path


def marked(config: Any, context: Any) -> Any:
    """The factory of ``marked``."""
    from drivetrain_rollout_vllm.engine import VLLMRollout

    class Marked(VLLMRollout):
        async def generate(self, request: Any) -> AsyncIterator[Any]:
            (config.folder / f"{self.context.rank}-{os.getpid()}").touch()
            async for completion in super().generate(request):
                yield completion

    return Marked(config, context)


@hookimpl
def drivetrain_rollouts() -> Iterable[RolloutSpec]:
    """Offer it."""
    from drivetrain_rollout_vllm import plugin

    (spec,) = plugin.drivetrain_rollouts()
    yield RolloutSpec(
        name="marked", summary="", factory="marked:marked", config="marked:MarkedConfig", provides=spec.provides
    )
