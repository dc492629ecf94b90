"""The config models. They look for the packages that a tracker needs, and import none of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from drivetrain import PluginConfig, RunConfig
from drivetrain.config import Problem, Written


class NeedyConfig(PluginConfig):
    """A tracker that needs packages of an extra of this distribution."""

    extra: ClassVar[str] = ""

    def packages(self) -> tuple[str, ...]:
        """The packages that have to be importable."""
        return (self.extra,)

    def check(self, run: RunConfig, registry: object) -> Iterable[Problem]:
        missing = [package for package in self.packages() if not _installed(package)]
        if missing:
            yield Problem(key="name", what=f"tracker {self.name!r} needs {', '.join(missing)}, not installed here",
                          mend=f"pip install 'drivetrain-trackers[{self.extra}]'")  # fmt: skip


def _installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a mere folder, such as W&B's ./wandb, has no origin


class CsvTrackerConfig(PluginConfig):
    """The tracker ``csv``."""


class ParquetTrackerConfig(NeedyConfig):
    """The tracker ``parquet``."""

    extra: ClassVar[str] = "parquet"

    def packages(self) -> tuple[str, ...]:
        return ("pyarrow",)


class TensorBoardConfig(NeedyConfig):
    """The tracker ``tensorboard``."""

    extra: ClassVar[str] = "tensorboard"

    dir: Annotated[Path | None, Written()] = Field(
        None, description="Folder of the event files. Omitted: tensorboard in the run folder."
    )
    samples: int = Field(8, ge=0, description="Samples of an evaluation that are written as text.")


class WandbConfig(NeedyConfig):
    """The tracker ``wandb``. What is omitted is as W&B's environment variables say."""

    extra: ClassVar[str] = "wandb"

    project: str | None = Field(None, description="Project. Omitted: WANDB_PROJECT, else drivetrain.")
    entity: str | None = Field(None, description="User or team. Omitted: WANDB_ENTITY, else the account's default.")
    run_name: str | None = Field(None, description="Name of the run. Omitted: that of the run folder.")
    group: str | None = Field(None, description="Group of runs that are shown together.")
    tags: tuple[str, ...] = Field((), description="Tags of the run.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="offline keeps all for `wandb sync`. Omitted: WANDB_MODE, else online."
    )
    dir: Annotated[Path | None, Written()] = Field(
        None, description="Folder in which W&B makes its folder wandb. Omitted: the run folder."
    )


class MlflowConfig(NeedyConfig):
    """The tracker ``mlflow``."""

    extra: ClassVar[str] = "mlflow"

    tracking_uri: str | None = Field(
        None,
        description="Server or database. Omitted: MLFLOW_TRACKING_URI, else mlflow.db in the run folder.",
    )
    experiment: str = Field("drivetrain", description="Experiment that the run belongs to; it is made if need be.")
    run_name: str | None = Field(None, description="Name of the run. Omitted: that of the run folder.")

    def chosen_uri(self) -> str | None:
        """The tracking URI that was given, here or in the environment."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")

    def packages(self) -> tuple[str, ...]:
        if (self.chosen_uri() or "sqlite").startswith(("sqlite", "postgresql", "mysql", "mssql")):
            return ("mlflow", "sqlalchemy", "alembic")
        return ("mlflow",)
