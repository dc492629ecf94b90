"""``drivetrain eval``, ``generate`` and ``export``: what can be done with a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.config.resolve import load_config
from drivetrain.errors import UserError
from drivetrain.seam.registry import get_registry

if TYPE_CHECKING:
    from drivetrain.driver.session import Session


def _open(run: Path, overrides: Sequence[str], *, scoring: bool = False) -> Session:
    """Load a run's config and its checkpoint's model."""
    from drivetrain.driver import checkpoints
    from drivetrain.driver.run_folder import CONFIG_FILE

    checkpoint = checkpoints.find(run.absolute(), lambda text: print(f"warning: {text}", file=sys.stderr))
    run_dir = checkpoint.parent.parent
    resolved = load_config(run_dir / CONFIG_FILE, overrides, get_registry())
    from drivetrain.driver.session import Session

    step = checkpoints.read_state(checkpoint)["step"]
    session = Session(resolved.run, training=False, scoring=scoring, reads=(checkpoint,))
    try:
        session.load_models(checkpoint)
    except BaseException:
        session.close()
        raise
    session.progress.step = step
    return session


def evaluate(run: Path, overrides: Sequence[str], *, as_json: bool) -> None:
    """Print the metrics of an evaluation."""
    with _open(run, overrides, scoring=True) as session:
        if session.eval_prompts is None:
            raise UserError("the run has no held-out prompts", where="data.eval", mend="give one as data.eval.name=...")
        from drivetrain.driver.evaluation import evaluate as run_evaluation

        metrics = dict(run_evaluation(session).metrics)
        if as_json:
            print(json.dumps({"step": session.progress.step, **metrics}))
        else:
            for name, value in metrics.items():
                print(f"{name:<28} {value:.4f}")


def generate(run: Path, overrides: Sequence[str], *, prompts: list[str], samples: int, temperature: float) -> None:
    """Print completions, one a line; without ``--prompt`` the prompts are read from standard input, one a line."""
    lines = prompts or ([] if sys.stdin.isatty() else [line.rstrip("\n") for line in sys.stdin])
    if not lines:
        raise UserError("no prompt", mend='give --prompt "..."')
    with _open(run, overrides) as session:
        from drivetrain.contracts.data import Example
        from drivetrain.driver.prompts import PromptSource
        from drivetrain.driver.text import decode_responses

        source = PromptSource([Example(prompt=line) for line in lines], session.tokenizer, session.run.data,
                              session.run.trainer.seed)  # fmt: skip
        for batch in source.all_batches(len(lines)):
            answers = session.roles.rollout.generate(batch, samples=samples, temperature=temperature)
            for prompt, text in zip(
                answers.non_tensor_batch["raw_prompt"], decode_responses(answers, session.tokenizer)
            ):
                print(f"{prompt}{text}", flush=True)


def export(run: Path, to: Path, overrides: Sequence[str]) -> None:
    """Write the model."""
    if to.exists():
        raise UserError("the folder to write exists", where=str(to), mend="choose another one")
    with _open(run, overrides) as session:
        session.policy.call("export_model", to.absolute())
    print(f"wrote {to}")
