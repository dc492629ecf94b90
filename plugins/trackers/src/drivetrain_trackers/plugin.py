"""What drivetrain-trackers offers."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain import TrackerSpec, hookimpl


@hookimpl
def drivetrain_trackers() -> Iterable[TrackerSpec]:
    yield TrackerSpec(
        name="csv",
        summary="Metrics as a table, metrics.csv in the run folder.",
        factory="drivetrain_trackers.metrics_csv:CsvTracker",
        config="drivetrain_trackers.configs:CsvTrackerConfig",
    )
    yield TrackerSpec(
        name="parquet",
        summary="Evaluation samples as Parquet files, samples/ in the run folder (needs drivetrain-trackers[parquet]).",
        factory="drivetrain_trackers.samples_parquet:ParquetTracker",
        config="drivetrain_trackers.configs:ParquetTrackerConfig",
    )
    yield TrackerSpec(
        name="tensorboard",
        summary="TensorBoard's event files (needs drivetrain-trackers[tensorboard]).",
        factory="drivetrain_trackers.tensorboard_events:TensorBoardTracker",
        config="drivetrain_trackers.configs:TensorBoardConfig",
    )
    yield TrackerSpec(
        name="wandb",
        summary="A run of Weights & Biases (needs drivetrain-trackers[wandb]).",
        factory="drivetrain_trackers.wandb_run:WandbTracker",
        config="drivetrain_trackers.configs:WandbConfig",
    )
    yield TrackerSpec(
        name="mlflow",
        summary="A run of MLflow, on a server or in the run folder (needs drivetrain-trackers[mlflow]).",
        factory="drivetrain_trackers.mlflow_run:MlflowTracker",
        config="drivetrain_trackers.configs:MlflowConfig",
    )
