"""The tracker ``mlflow``."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain import RunInfo, RunResult, Tracker
from drivetrain_trackers.files import KeptId
from drivetrain_trackers.rows import flat, table, text

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from drivetrain_trackers.configs import MlflowConfig

ID_FILE = "mlflow-run.json"
DATABASE = "mlflow.db"
ARTIFACTS = "mlflow-artifacts"
BATCH = 100
STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowTracker(Tracker):
    """Logs a run to MLflow: the config as parameters and file, metrics by step, samples as files, the status.

    It uses a client of its own, so that the process may have another active MLflow run. A resumed run goes on in the
    same MLflow run, whose parameters stay those of its start; the file ``config.yaml`` is that of the last start.
    """

    background: ClassVar[bool] = True
    config: MlflowConfig
    _client: MlflowClient
    _run_id: str

    def started(self, info: RunInfo) -> None:
        from mlflow import MlflowClient

        for name in ("mlflow.store.db.utils", "alembic"):  # a line for each table that a new database gets
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = MlflowClient(self.config.chosen_uri() or f"sqlite:///{info.run_dir / DATABASE}")
        config, kept = info.config.model_dump(mode="json"), KeptId(info.run_dir / ID_FILE)
        earlier = kept.read() if info.first_step > 1 else None
        if earlier is not None:
            self._run_id = earlier
            self._client.update_run(earlier, status="RUNNING")
        else:
            name = self.config.run_name or info.run_dir.name
            self._run_id = self._client.create_run(self._experiment(info.run_dir), run_name=name).info.run_id
            kept.write(self._run_id)
            self._log_params(config)
        self._client.log_dict(self._run_id, config, "config.yaml")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        made = [Metric(_name(name), float(value), now, step) for name, value in metrics.items()]
        for at in range(0, len(made), BATCH):
            self._client.log_batch(self._run_id, metrics=made[at : at + BATCH])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = table(rows)
        plain = [dict(zip(columns, row)) for row in zip(*columns.values())]
        self._client.log_dict(self._run_id, {"step": step, "samples": plain}, f"samples/step-{step:06d}.json")

    def ended(self, result: RunResult) -> None:
        self._client.set_tag(self._run_id, "drivetrain.status", result.status)
        if result.error is not None:
            self._client.set_tag(self._run_id, "drivetrain.error", text(result.error))
        self._client.set_terminated(self._run_id, STATUS[result.status])

    def _experiment(self, run_dir: Path) -> str:
        found = self._client.get_experiment_by_name(self.config.experiment)
        if found is not None:
            return str(found.experiment_id)
        artifacts = None if self.config.chosen_uri() else (run_dir / ARTIFACTS).as_uri()
        return str(self._client.create_experiment(self.config.experiment, artifact_location=artifacts))

    def _log_params(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        made = [Param(_name(key), text(value)) for key, value in flat(config)]
        for at in range(0, len(made), BATCH):
            self._client.log_batch(self._run_id, params=made[at : at + BATCH])


def _name(name: str) -> str:
    """The name with what MLflow does not take replaced."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
