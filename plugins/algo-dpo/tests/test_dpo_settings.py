"""Settings and data that cannot be meant are refused, and runs leave what a run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import dpo_rig as rig
import pytest

from drivetrain import ConfigError, UserError
from drivetrain.cli.train import train

ONLINE = ["algorithm.name=online_dpo"]


@pytest.mark.parametrize("overrides, said", [
    (["data.train.rejected_key=null"], "rejected_key is not set"),
    (["data.train.response_key=null"], "response_key is not set"),
    (["algorithm.kind=ipo", "algorithm.label_smoothing=0.1"], "the loss 'ipo' does not read it"),
    (["algorithm.label_smoothing=0.5"], "algorithm.label_smoothing"),
    (["algorithm.beta=0"], "algorithm.beta"),
    (["algorithm.group_size=2"], "unknown key 'group_size'"),
    ([*ONLINE, "rollout.temperature=0"], "draws every sample of a prompt alike"),
    ([*ONLINE, "algorithm.group_size=1"], "algorithm.group_size"),
    ([*ONLINE, "rewards=[]"], "rewards are missing"),
    ([*ONLINE, "rollout=null"], "rollout is missing"),
    ([*ONLINE, "algorithm.reference=policy", "ref.backend.name=fsdp"], "has no role ref"),
])  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(run_file: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rig.config(run_file, *overrides)
    assert said in str(raised.value)


def test_roles_follow_from_the_settings(run_file: Path) -> None:
    assert rig.config(run_file).algorithm.samples_per_prompt() == 2
    assert rig.config(run_file, *ONLINE, "algorithm.group_size=3").algorithm.samples_per_prompt() == 3
    assert rig.config(run_file, "ref=null").ref.backend.name == "fsdp"
    assert rig.config(run_file, *ONLINE, "ref=null").ref.backend.name == "fsdp"
    assert rig.config(run_file, *ONLINE, "ref=null", "algorithm.reference=policy").ref is None
    offline = rig.config(run_file, "rewards=[]", "rollout=null")
    assert offline.rollout is None and not offline.rewards


def test_a_record_without_its_rejected_text_is_named(run_file: Path, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "1=", "chosen": "2"}))
    with pytest.raises(UserError, match="no key 'rejected'") as raised, rig.opened(run_file, f"data.train.path={data}"):
        pass
    assert "pairs.jsonl:1" in str(raised.value) and "rejected_key" in str(raised.value)


@pytest.mark.parametrize("name", ["dpo", "online_dpo"])
def test_a_run_and_its_resumption(run_file: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    options = [f"algorithm.name={name}", f"trainer.run_dir={folder}", "trackers=[{name: jsonl}]"]
    assert train(run_file, [*options, "trainer.steps=2"], resume=None, overwrite=False) == 0
    assert train(run_file, [*options, "trainer.steps=3"], resume=str(folder), overwrite=False) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    wanted = {"train/loss", "train/preference_accuracy", "train/margin", "train/chosen_log_ratio",
              "train/rejected_log_ratio"}  # fmt: skip
    assert all(wanted <= row.keys() for row in rows)
    assert ("train/groups_without_signal" in rows[0]) == ("train/reward" in rows[0]) == (name == "online_dpo")
