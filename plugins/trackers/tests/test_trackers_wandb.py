"""The tracker ``wandb``, offline; what it wrote is read from W&B's own files."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from drivetrain import RunResult, UserError
from drivetrain_trackers.configs import WandbConfig
from drivetrain_trackers.wandb_run import WandbTracker

Tell = Callable[..., None]
BLOCK = 32768


def records(path: Path) -> Iterator[Record]:
    """The records of a ``.wandb`` file: a LevelDB log (blocks of fragments) after a header of 7 bytes."""
    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last fragment
            yield Record.FromString(parts)
            parts = b""


def history(path: Path) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append((record.history.step.num, items))
    return rows


def folders(run_dir: Path) -> list[Path]:
    """W&B's folders of runs, in the order in which they were made.

    W&B's own process writes them and is waited for, as it is when a program ends.
    """
    wandb.teardown()
    return sorted((run_dir / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)


def file_of(folder: Path) -> Path:
    [file] = folder.glob("*.wandb")
    return file


def tracker(**options: Any) -> WandbTracker:
    return WandbTracker(WandbConfig(name="wandb", mode="offline", **options))


def test_an_offline_run(tmp_path: Path, tell: Tell, result: Callable[..., RunResult]) -> None:
    made = tracker(project="sums", entity="us", run_name="first", group="all", tags=("tiny", "grpo"))
    tell(made, tmp_path, range(3))
    made.ended(result("failed", "no memory"))
    [folder] = folders(tmp_path)
    found = list(records(file_of(folder)))
    [run] = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.entity, run.display_name, run.run_group) == ("sums", "us", "first", "all")
    assert list(run.tags) == ["tiny", "grpo"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["rewards"] == [{"name": "exact_match", "weight": 1.0}]
    [end] = [record.exit for record in found if record.WhichOneof("record_type") == "exit"]
    assert end.exit_code == 1
    summary = {item.key: item.value_json for record in found for item in record.summary.update}
    assert (json.loads(summary["status"]), json.loads(summary["error"])) == ("failed", "no memory")

    rows = history(file_of(folder))
    assert [(at, row["step"], row.get("train/reward")) for at, row in rows] == [(0, 0, None), (1, 1, 1), (2, 2, 2)]
    assert math.isnan(rows[2][1]["train/kl"]) and rows[2][1]["train/grad_norm"] == math.inf
    assert [at for at, row in rows if "eval/samples/path" in row] == [0, 2]
    table = json.loads((folder / "files" / rows[2][1]["eval/samples/path"]).read_text())
    assert table["columns"] == ["prompt", "response", "answer", "score", "correct", "data_source"]
    assert table["data"][0] == ["3|4=", "4\nü", "4", 1.0, True, "max"]
    assert json.loads((tmp_path / "wandb-run.json").read_text()) == {"id": run.run_id}


def test_a_resumed_run_has_the_same_id(tmp_path: Path, tell: Tell, result: Callable[..., RunResult]) -> None:
    for steps, first_step in ((range(5), 1), (range(3, 6), 3), (range(2), 1)):
        made = tracker(dir=tmp_path)
        tell(made, tmp_path, steps, first_step=first_step)
        made.ended(result())
    ids = [file_of(folder).stem.removeprefix("run-") for folder in folders(tmp_path)]
    assert ids[0] == ids[1] != ids[2]
    assert json.loads((tmp_path / "wandb-run.json").read_text()) == {"id": ids[2]}
    steps = [[(at, row["step"]) for at, row in history(file_of(folder))] for folder in folders(tmp_path)]
    assert steps == [[(n, n) for n in range(5)], [(3, 3), (4, 4), (5, 5)], [(0, 0), (1, 1)]]


def test_steps_taken_again_get_records_of_their_own(tmp_path: Path, tell: Tell, result) -> None:
    """W&B drops a record before its last one; a server that has seen five records goes on with the sixth."""
    made = tracker()
    tell(made, tmp_path, range(5))
    for step in (3, 4, 5, 9):
        if step % 2 == 0:
            made.samples(step, [{"prompt": "p"}])
        made.metrics(step, {"train/reward": 0.5})
    made.ended(result())
    rows = history(file_of(folders(tmp_path)[0]))
    assert [(at, row["step"]) for at, row in rows[5:]] == [(5, 3), (6, 4), (7, 5), (9, 9)]
    assert "eval/samples/path" in rows[6][1] and rows[6][1]["train/reward"] == 0.5


def test_an_online_run_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for before the run, without asking the server."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:1")
    for key, said in (
        (None, "no API key.*\n.*wandb login"),
        ("short", "API key must have.*\n.*wandb login"),
        ("k" * 40, ""),
    ):
        wandb.teardown()
        if key:
            monkeypatch.setenv("WANDB_API_KEY", key)
        with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
            WandbTracker(WandbConfig(name="wandb", mode="online"))


def test_disabled(tmp_path: Path, tell: Tell, result: Callable[..., RunResult]) -> None:
    made = WandbTracker(WandbConfig(name="wandb", mode="disabled"))
    tell(made, tmp_path, range(3))
    made.ended(result())
    assert not folders(tmp_path)
