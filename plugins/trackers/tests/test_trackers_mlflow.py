"""The tracker ``mlflow``, in a database file and with a client that reads it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from drivetrain import RunResult
from drivetrain_trackers.configs import MlflowConfig
from drivetrain_trackers.mlflow_run import MlflowTracker

Tell = Callable[..., None]


def tracker(**options: Any) -> MlflowTracker:
    return MlflowTracker(MlflowConfig(name="mlflow", **options))


def runs(client: MlflowClient, experiment: str = "drivetrain") -> list[Run]:
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"]))


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with tables; making them takes seconds."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}")
    return path


def test_a_run_in_the_run_folder(tmp_path: Path, tell: Tell, result: Callable[..., RunResult]) -> None:
    made = tracker(run_name="first")
    tell(made, tmp_path, range(3))
    made.metrics(3, {"eval/a?b/accuracy": 1.0})
    made.ended(result("failed", "no memory"))
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = runs(client)
    assert (run.info.run_name, run.info.status) == ("first", "FAILED")
    assert run.data.params == {"model.path": "models/tiny", "rewards.0.name": "exact_match", "rewards.0.weight": "1.0",
                               "ref": "null"}  # fmt: skip
    assert (run.data.tags["drivetrain.status"], run.data.tags["drivetrain.error"]) == ("failed", "no memory")
    history = {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
               for name in run.data.metrics}  # fmt: skip
    assert history["train/reward"] == history["train/reward/exact_match"] == [(1, 1.0), (2, 2.0)]
    assert history["eval/accuracy"] == [(0, 0.25), (2, 0.5)]
    assert [math.isnan(value) for _, value in history["train/kl"]] == [True, True]
    assert all(value > 1e300 for _, value in history["train/grad_norm"])
    assert history["eval/a_b/accuracy"] == [(3, 1.0)]
    files = tmp_path / "mlflow-artifacts" / run.info.run_id / "artifacts"
    assert sorted(str(path.relative_to(files)) for path in files.rglob("*.*")) == [
        "config.yaml", "samples/step-000000.json", "samples/step-000002.json"
    ]  # fmt: skip
    samples = json.loads((files / "samples" / "step-000002.json").read_text())
    assert samples["step"] == 2 and samples["samples"][0]["response"] == "4\nü"
    assert json.loads((tmp_path / "mlflow-run.json").read_text()) == {"id": run.info.run_id}


def test_a_resumed_run_goes_on(tmp_path: Path, tell: Tell, result: Callable[..., RunResult], empty: Path) -> None:
    uri = f"sqlite:///{shutil.copy(empty, tmp_path / 'sums.db')}"
    for steps, first_step, status in (
        (range(3), 1, "interrupted"),
        (range(3, 5), 3, "finished"),
        (range(1), 1, "failed"),
    ):
        made = tracker(tracking_uri=uri, experiment="sums")
        tell(made, tmp_path, steps, first_step=first_step)
        made.ended(result(status))
    client = MlflowClient(uri)
    first, second = runs(client, "sums")
    assert (first.info.status, second.info.status) == ("FINISHED", "FAILED")
    assert (first.info.run_name, first.info.start_time <= second.info.start_time) == (tmp_path.name, True)
    assert [m.step for m in client.get_metric_history(first.info.run_id, "train/reward")] == [1, 2, 3, 4]
    assert [m.step for m in client.get_metric_history(second.info.run_id, "eval/accuracy")] == [0]


def test_the_environment_names_the_store(
    tmp_path: Path, tell: Tell, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = f"sqlite:///{shutil.copy(empty, tmp_path / 'elsewhere.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere)
    tell(tracker(), tmp_path, range(1))
    assert [run.info.status for run in runs(MlflowClient(elsewhere))] == ["RUNNING"]
    assert not (tmp_path / "mlflow.db").exists()
