"""A run that breaks leaves what it had, and one that goes wrong says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

HUGE = "actor.optimizer.lr=1e30"  # one step leaves weights whose logits overflow


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_numbers_that_are_not_finite_never_reach_the_weights(tmp_path: Path, name: str, drivetrain) -> None:
    config = dict(zip(("sft", "grpo"), tiny.write_configs(tmp_path)))[name]
    reward = [f"rewards=[{{name: function, path: '{tmp_path / 'length.py'}:score'}}]"]  # differs within every group
    (tmp_path / "length.py").write_text("def score(response):\n    return float(sum(map(ord, response)) % 7)\n")
    common = ("train", config, HUGE, *reward, "trainer.save_every=1", "data.eval=null")
    drivetrain(*common, "trainer.steps=1", f"trainer.run_dir={tmp_path / 'one'}")
    more = drivetrain(*common, "trainer.steps=9", f"trainer.run_dir={tmp_path / 'more'}", code=1)
    assert "no weight was changed" in more.stderr and "Traceback" not in more.stderr
    kept = sorted((tmp_path / "more" / "checkpoints").glob("step-*"))
    assert [folder.name for folder in kept] == ["step-000001"]
    actor = [files(tmp_path / run / "checkpoints" / "step-000001" / "actor") for run in ("one", "more")]
    assert actor[0] == actor[1]


def test_the_best_checkpoint_is_found_by_its_metric(tmp_path: Path, drivetrain) -> None:
    sft, _ = tiny.write_configs(tmp_path)
    settings = ["trainer.save_every=3", "trainer.eval_every=3", "trainer.keep_checkpoints=1",
                "trainer.best_metric=eval/reward", "trainer.best_is=lowest"]  # fmt: skip
    drivetrain("train", sft, *settings)
    checkpoints = tmp_path / "runs/sft/checkpoints"
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-000003", "step-000012"]
    best = drivetrain("eval", checkpoints / "best", "--json")
    newest = drivetrain("eval", tmp_path / "runs/sft", "--json")
    assert '"step": 3' in best.stdout and '"step": 12' in newest.stdout


@pytest.mark.parametrize(
    "settings, words",
    [
        (["trainer.best_metric=eval/accuracy"], ["trainer.best_metric", "set trainer.save_every"]),
        (["trainer.best_metric=eval/accuracy", "trainer.save_every=2", "trainer.eval_every=4"], ["not evaluated"]),
        (["trainer.best_metric=eval/acuracy", "trainer.save_every=4", "trainer.eval_every=4"],
         ["'eval/acuracy'", "choose from eval/accuracy, eval/resp"]),
        (["trainer.best_is=lowest"], ["is not read without best_metric"]),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_made_is_refused(
    tmp_path: Path, settings: list[str], words: list[str], drivetrain
) -> None:
    sft, _ = tiny.write_configs(tmp_path)
    refused = drivetrain("train", sft, *settings, code=2)
    assert all(word in refused.stderr for word in words), refused.stderr
