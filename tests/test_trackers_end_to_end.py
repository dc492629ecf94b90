"""Every tracker in one short run, and in the run that goes on from it."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pyarrow.parquet
import pytest
import tiny
import yaml
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

NAMES = ("lines", "jsonl", "csv", "parquet", "tensorboard", "wandb", "mlflow")


def test_all_trackers_at_once(tmp_path: Path, drivetrain_process, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "DO_NOT_TRACK": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sft, _ = tiny.write_configs(tmp_path)
    run = yaml.safe_load(sft.read_text())
    run["trackers"] = [{"name": name, **({"mode": "offline"} if name == "wandb" else {})} for name in NAMES]
    sft.write_text(yaml.safe_dump(run))
    for steps, resume in ((2, ()), (3, ("--resume", "auto"))):
        done = drivetrain_process("train", sft, f"trainer.steps={steps}", "trainer.eval_every=1", *resume)
        assert "warning:" not in done.stderr

    folder = tmp_path / "runs/sft"
    expected = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in expected] == [0, 1, 2, 3]
    accuracy = [row["eval/accuracy"] for row in expected]

    with (folder / "metrics.csv").open(newline="") as file:
        assert [float(row["eval/accuracy"]) for row in csv.DictReader(file)] == accuracy
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    table = pyarrow.parquet.read_table(folder / "samples").to_pylist()
    assert [(row["step"], row["response"]) for row in table] == [(row["step"], row["response"]) for row in samples]

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("eval/accuracy")] == pytest.approx(accuracy)
    assert len(list((folder / "wandb").glob("offline-run-*/*.wandb"))) == 2
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    run_id = json.loads((folder / "mlflow-run.json").read_text())["id"]
    assert client.get_run(run_id).info.status == "FINISHED"
    assert [metric.value for metric in client.get_metric_history(run_id, "eval/accuracy")] == accuracy


def test_a_package_that_is_not_there_is_said_at_once(tmp_path: Path, drivetrain_process, monkeypatch) -> None:
    """Selecting a tracker without its package is one line, before anything loads."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import importlib.util\nreal = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'wandb' else real(name, *rest)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(blocked), os.environ.get("PYTHONPATH")])))
    sft, _ = tiny.write_configs(tmp_path)
    refused = drivetrain_process("train", sft, "trackers=[{name: wandb}]", code=2)
    assert refused.stderr.splitlines()[0] == (
        "error: tracker 'wandb' needs wandb, not installed here (command line: trackers.0.name)"
    )
    assert "pip install 'drivetrain-trackers[wandb]'" in refused.stderr
    assert not (tmp_path / "runs").exists()
