"""The tracker ``wandb``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain import RunInfo, RunResult, Tracker, UserError
from drivetrain_trackers.files import KeptId
from drivetrain_trackers.rows import table, text

if TYPE_CHECKING:
    import wandb

    from drivetrain_trackers.configs import WandbConfig

ID_FILE = "wandb-run.json"
#: less than the driver waits for a tracker; what is not uploaded by then stays on disk for ``wandb sync``
FINISH_TIMEOUT_S = 50.0


class WandbTracker(Tracker):
    """Logs a run to Weights & Biases: the config, metrics over the axis ``step``, samples as tables, the status.

    A resumed run goes on in the same W&B run. W&B takes no record for a step that lies before its last one, therefore
    its own counter of records runs on while steps are taken again, and charts are drawn over ``step``.
    """

    background: ClassVar[bool] = True
    config: WandbConfig
    _run: wandb.Run

    def __init__(self, config: WandbConfig) -> None:
        """Look for credentials, without asking the server. Raises UserError if an online run has none."""
        import wandb

        super().__init__(config)
        usual = wandb.setup().settings.mode
        self._mode: Any = config.mode or usual
        if self._mode == usual == "online" and wandb.run is None:  # W&B looks in no other case
            try:
                found = wandb.login(prompt=False, verify=False)
            except wandb.errors.AuthenticationError as cause:
                raise UserError(f"tracker 'wandb': {cause}", mend="run `wandb login`, or mend WANDB_API_KEY") from cause
            if not found:
                raise UserError("tracker 'wandb' has no API key of Weights & Biases",
                                mend="run `wandb login`, set WANDB_API_KEY, or choose mode: offline")  # fmt: skip

    def started(self, info: RunInfo) -> None:
        import wandb

        config, kept = self.config, KeptId(info.run_dir / ID_FILE)
        earlier = kept.read() if info.first_step > 1 else None
        self._run = wandb.init(
            project=config.project or os.environ.get("WANDB_PROJECT") or "drivetrain",
            entity=config.entity,
            name=config.run_name or info.run_dir.name,
            group=config.group,
            tags=config.tags or None,
            mode=self._mode,
            dir=config.dir or info.run_dir,
            id=earlier,
            # an offline run has no server to ask; its parts have one id, and `wandb sync` uploads them in order
            resume="allow" if earlier and self._mode == "online" else None,
            config=info.config.model_dump(mode="json"),
            allow_val_change=True,
            # standard output belongs to the trackers that print
            settings=wandb.Settings(console="off", finish_timeout=FINISH_TIMEOUT_S),
        )
        kept.write(self._run.id)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._step, self._record = -1, self._run.step - 1

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        columns = table(rows)
        made = wandb.Table(columns=list(columns), data=[list(row) for row in zip(*columns.values())])
        self._log(step, {"eval/samples": made})

    def ended(self, result: RunResult) -> None:
        self._run.summary["status"] = result.status
        if result.error is not None:
            self._run.summary["error"] = text(result.error)
        self._run.finish(exit_code=0 if result.status == "finished" else 1)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if step != self._step:  # what belongs to one step makes one record
            self._step, self._record = step, max(step, self._record + 1)
        self._run.log({"step": step, **values}, step=self._record)
