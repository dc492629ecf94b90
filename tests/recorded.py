"""Rollouts that are written down, and given again: so that runs on any number of processes train on the same tokens.

``recording`` generates as ``hf`` does and appends every sample to a file; it yields these, or where it is given samples
of another run, those. ``replay`` yields what it is given and has no model. A sample is known by its seed, which is the
same wherever it is drawn. :func:`drivetrain.testing.processes.install` makes both known
to processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain import RolloutConfig, RolloutSpec, hookimpl
from drivetrain_rollout_hf.config import HFRolloutConfig

PROVIDES = ("rollout.log_probs", "rollout.live_module", "rollout.load_weights")


class ReplayConfig(RolloutConfig):
    """The section of ``replay``."""

    folder: Path  # with one file for each process that wrote


class RecordingConfig(HFRolloutConfig):
    """The section of ``recording``, which the engine ``hf`` reads too."""

    folder: Path
    given: Path | None = None  # a folder of samples to yield instead


def _recording() -> Any:
    from drivetrain_rollout_hf.engine import HFRollout

    class Recording(HFRollout):
        def initialize(self) -> None:
            super().initialize()
            self._given = read(self.config.given) if self.config.given else None

        async def generate(self, request: Any) -> AsyncIterator[Any]:
            async for completion in super().generate(request):
                row = {
                    "tokens": completion.token_ids,
                    "log_probs": completion.log_probs,
                    "end": completion.finish_reason,
                }
                with (self.config.folder / f"{os.getpid()}.jsonl").open("a") as file:
                    file.write(json.dumps({"seed": request.seeds[completion.sample], **row}) + "\n")
                if self._given is not None:
                    row = self._given[request.seeds[completion.sample]]
                yield replace(completion, token_ids=tuple(row["tokens"]), log_probs=tuple(row["log_probs"]),
                              finish_reason=row["end"])  # fmt: skip

    return Recording


def _replay() -> Any:
    from drivetrain import Completion, RolloutEngine

    class Replay(RolloutEngine):
        def initialize(self) -> None:
            self._samples = read(self.config.folder)

        async def generate(self, request: Any) -> AsyncIterator[Any]:
            for sample, seed in enumerate(request.seeds):
                row = self._samples[seed]
                yield Completion(
                    request_id=request.request_id, sample=sample, token_ids=tuple(row["tokens"]),
                    log_probs=tuple(row["log_probs"]), finish_reason=row["end"], weight_versions=((0, 0),),
                )  # fmt: skip

        async def abort(self, request_id: str) -> None: ...

        async def pause(self) -> None: ...

        async def resume(self) -> None: ...

        def attach(self, module: Any) -> None: ...

        def load_weights(self, stream: Any, version: int) -> None:
            for _ in stream:
                pass
            self.weight_version = version

    return Replay


def recording(config: Any, context: Any) -> Any:
    """The factory of ``recording``."""
    return _recording()(config, context)


def replay(config: Any, context: Any) -> Any:
    """The factory of ``replay``."""
    return _replay()(config, context)


@hookimpl
def drivetrain_rollouts() -> Iterable[RolloutSpec]:
    yield RolloutSpec(name="recording", summary="", factory="recorded:recording", config="recorded:RecordingConfig",
                      provides=PROVIDES)  # fmt: skip
    yield RolloutSpec(name="replay", summary="", factory="recorded:replay", config="recorded:ReplayConfig",
                      provides=PROVIDES)  # fmt: skip


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """The samples by their seeds."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return {row["seed"]: row for row in map(json.loads, lines)}


def first(folder: Path, steps: int) -> dict[int, dict[str, Any]]:
    """The samples of the first of so many steps of a run of one process."""
    samples = list(read(folder).items())
    return dict(samples[: len(samples) // steps])


def train(config: Path, pythonpath: str, run_dir: Path, *settings: str) -> list[dict[str, float]]:
    """Run the command line in a process of its own; returns the metrics of the steps."""
    command = [sys.executable, "-c", "from drivetrain.cli.main import main; main()", "train", str(config)]
    done = subprocess.run(
        [*command, f"trainer.run_dir={run_dir}", "data.batch_prompts=12", "data.eval=null", *settings],
        env={**os.environ, "PYTHONPATH": pythonpath}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]
