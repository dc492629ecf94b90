"""The loop of a training run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drivetrain.contracts.algorithm import Algorithm
from drivetrain.contracts.observers import StepEnded
from drivetrain.contracts.tracker import RunInfo, RunResult
from drivetrain.driver import checkpoints
from drivetrain.driver.evaluation import evaluate
from drivetrain.driver.health import Health
from drivetrain.driver.saving import Saving
from drivetrain.driver.session import Session
from drivetrain.driver.stats import batch_metrics
from drivetrain.driver.tracking import Tracking
from drivetrain.errors import UserError
from drivetrain.metrics import to_floats
from drivetrain.protocol import DataProto
from drivetrain.seam.registry import resolve


class Trainer:
    """Runs an algorithm on a session for the planned number of steps."""

    def __init__(self, session: Session, tracking: Tracking, run_dir: Path, notes: Sequence[str] = ()) -> None:
        self.session = session
        self.run = session.run
        self.tracking = tracking
        self.run_dir = run_dir
        self.notes = tuple(notes)
        self.algorithm: Algorithm = resolve("algorithms", self.run.algorithm.name)(self.run.algorithm)
        rollout = self.run.rollout
        self.health = Health(self.run.trainer.health, cuts=rollout is not None and rollout.truncates_distribution)
        self.saving = Saving(session, tracking, run_dir)
        self.metrics: dict[str, float] = {}

    def train(self, stop: Callable[[], bool] = lambda: False) -> RunResult:
        """Take the steps that are left; ``stop`` is asked in each one, before it may save."""
        session, steps = self.session, self.run.trainer.steps
        assert session.train_prompts is not None
        self.tracking.started(self._info())
        if session.progress.step == 0:
            self._evaluate()
            self._know_best_metric()
            self._log()
        stopping = stop()
        with self.saving:
            while session.progress.step < steps and not stopping:
                session.progress.step += 1
                session.start_profile()
                start = time.perf_counter()
                prompts = session.train_prompts.next_batch(self.run.data.batch_prompts)  # 1. prompts
                batch = self.algorithm.collect(session.roles, prompts)  # 2. what to learn from
                learned = self.algorithm.learn(session.roles, batch)  # 3. learn
                self._measure(batch, to_floats(learned), time.perf_counter() - start)
                if self._due(self.run.trainer.eval_every):
                    self._evaluate()  # 4. held-out prompts
                self._log()  # 5. numbers, before the checkpoint: what a run resumes from has been told
                stopping = stop()  # asked once a step: a run that stops has saved the step
                if self._due(self.run.trainer.save_every) or stopping:
                    self._save()  # 6. a checkpoint
                else:
                    self.saving.advance()  # of an earlier step
                session.stop_profile()
        done = session.progress.step
        return RunResult(
            status="finished" if done >= steps else "interrupted", steps_done=done, steps_planned=steps,
            run_dir=self.run_dir, last_metrics=self.metrics,
        )  # fmt: skip

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            UserError: it is of another algorithm.
        """
        state = checkpoints.read_state(folder)
        if state["algorithm_name"] != self.run.algorithm.name:
            raise UserError(f"the checkpoint is of algorithm {state['algorithm_name']!r}, not "
                            f"{self.run.algorithm.name!r}", where=str(folder))  # fmt: skip
        assert self.session.train_prompts is not None
        self.session.load_models(folder)
        self.session.progress.step, self.session.progress.updates = state["step"], state["updates"]
        self.session.train_prompts.load_state_dict(state["prompts"])
        self.algorithm.load_state_dict(state["algorithm"] | checkpoints.read_batches(folder))
        self.health.load_state_dict(state["health"])

    def _due(self, every: int) -> bool:
        step = self.session.progress.step
        return step == self.run.trainer.steps or (every > 0 and step % every == 0)

    def _measure(self, batch: Any, learned: dict[str, float], seconds: float) -> None:
        numbers = {f"train/{name}": value for name, value in {**batch_metrics(batch), **learned}.items()}
        tokens = float(batch["response_mask"].sum())
        self.metrics = {**numbers, "train/step_tokens": tokens, "throughput/tokens_per_s": tokens / seconds,
                        "time/step_s": seconds}  # fmt: skip
        for sign in self.health.watch(self.metrics):
            self.tracking.warn(sign)

    def _evaluate(self) -> None:
        if self.session.eval_prompts is None:
            return
        evaluation = evaluate(self.session)
        self.metrics |= evaluation.metrics
        self.tracking.samples(self.session.progress.step, evaluation.samples)

    def _save(self) -> None:
        session = self.session
        step = session.progress.step
        assert session.train_prompts is not None
        kept = self.algorithm.state_dict()
        batches = {name: value for name, value in kept.items() if isinstance(value, DataProto)}
        state = {
            "step": step, "updates": session.progress.updates, "algorithm_name": self.run.algorithm.name,
            "algorithm": {name: value for name, value in kept.items() if name not in batches},
            "prompts": session.train_prompts.state_dict(), "health": self.health.state_dict(), "merit": self._merit(),
        }  # fmt: skip
        with session.phases("save", side="training"):
            self.saving.save(step, state, batches)

    def _know_best_metric(self) -> None:
        """Raises UserError if checkpoints are to be chosen by a metric that evaluations do not have."""
        name = self.run.trainer.best_metric or ""
        if name.startswith("eval/") and name not in self.metrics:
            raise UserError(f"no metric is called {name!r}", where="trainer.best_metric",
                            mend=f"choose from {', '.join(sorted(self.metrics))}")  # fmt: skip

    def _merit(self) -> float | None:
        """The metric that the best checkpoint is chosen by; None where the step has no such number."""
        name = self.run.trainer.best_metric
        value = self.metrics.get(name, math.nan) if name else math.nan
        if name and not math.isfinite(value):
            self.tracking.warn(f"this checkpoint cannot be the best one: the step has no {name}")
        return value if math.isfinite(value) else None

    def _log(self) -> None:
        step = self.session.progress.step
        self.metrics |= self.session.phases.take()
        if step % self.run.trainer.log_every == 0 or self._due(0) or any(n.startswith("eval/") for n in self.metrics):
            self.tracking.metrics(step, self.metrics)
        self.tracking.step_ended(StepEnded(step=step, run_dir=self.run_dir, metrics=self.metrics))

    def _info(self) -> RunInfo:
        run, notes = self.run, (*self.notes, *self.algorithm.notes(self.session.roles))
        prompts, samples = run.data.batch_prompts, run.algorithm.samples_per_prompt()
        plan: dict[str, int | str] = {
            "steps": run.trainer.steps, "prompts": prompts, "samples": samples, "sequences": prompts * samples,
            "mini-batches": prompts // (run.actor.mini_batch_prompts or prompts),
            "workers": self.session.policy.world_size,
        }  # fmt: skip
        return RunInfo(run_dir=self.run_dir, config=run, notes=notes,
                       first_step=self.session.progress.step + 1, plan=plan)  # fmt: skip
