from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain import RunInfo, RunResult

CONFIG = {
    "model": {"path": "models/tiny"},
    "algorithm": {"name": "grpo"},
    "actor": {"backend": {"name": "fsdp"}},
    "rollout": {"name": "hf"},
    "trainer": {"steps": 3, "seed": 7},
}


def metrics_of(steps: int) -> list[dict[str, float]]:
    """Metrics of steps 0..steps; step 0 has evaluations alone."""
    out: list[dict[str, float]] = [{"step": 0, "eval/accuracy": 0.125}]
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "train/reward": 0.1 + 0.8 * step / steps,
            "train/reward/exact_match": 0.05 + 0.8 * step / steps,
            "train/response_tokens": 4.0,
            "train/kl": 0.001 * step,
            "train/entropy": 1.5,
            "train/grad_norm": 0.75,
            "train/odd_metric": 2.0 * step,
            "time/generate_s": 0.3,
            "time/update_s": 0.2,
            "time/step_s": 0.52,
            "throughput/tokens_per_s": 1234.0,
        }
        if step == steps:
            row["eval/accuracy"] = 0.75
        out.append(row)
    return out


def sample_row(step: int, prompt: str, response: str, correct: bool) -> dict[str, Any]:
    return {"step": step, "prompt": prompt, "response": response, "answer": "7", "score": float(correct),
            "correct": correct, "data_source": "sums"}  # fmt: skip


def write_json_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def rows() -> Callable[[int], list[dict[str, float]]]:
    return metrics_of


@pytest.fixture
def sample() -> Callable[[int, str, str, bool], dict[str, Any]]:
    return sample_row


@pytest.fixture
def write_lines() -> Callable[[Path, Sequence[Mapping[str, Any]]], None]:
    return write_json_lines


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder of three steps."""
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    write_json_lines(folder / "metrics.jsonl", metrics_of(3))
    write_json_lines(folder / "samples.jsonl", [sample_row(0, "3 + 4 =", "<script>alert(1)</script>", False),
                                           sample_row(3, "3 + 4 =", "7", True)])  # fmt: skip
    (folder / "config.yaml").write_text("algorithm: {name: grpo}\nmodel: {path: models/tiny}\ntrainer: {steps: 3}\n")
    return folder


@pytest.fixture
def make_info(tmp_path: Path) -> Callable[..., RunInfo]:
    def make(folder: Path | None = None, first_step: int = 1, config: Mapping[str, Any] = CONFIG) -> RunInfo:
        return RunInfo(
            run_dir=folder or tmp_path,
            config=SimpleNamespace(model_dump=lambda mode: dict(config)),  # type: ignore[arg-type]
            notes=["hardware: cpu", "ref derives\nfrom [bold]actor"],
            first_step=first_step,
            plan={"steps": 3, "prompts": 32, "samples": 8, "sequences": 256, "mini-batches": 1},
        )

    return make


@pytest.fixture
def make_result(tmp_path: Path) -> Callable[..., RunResult]:
    def make(folder: Path | None = None, status: str = "finished", steps_done: int = 3, error: str | None = None):
        return RunResult(status=status, steps_done=steps_done, steps_planned=3, run_dir=folder or tmp_path,
                         last_metrics={}, error=error)  # fmt: skip

    return make
