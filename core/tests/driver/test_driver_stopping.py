"""The first signal asks, the second one ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from driver_rig import RUN, Little

from drivetrain.cli import train
from drivetrain.driver import session
from drivetrain.driver.stopping import StopRequest

PROGRAM = """
import os, signal, sys
from drivetrain.driver.stopping import StopRequest

number = int(sys.argv[1])
before = signal.getsignal(number)  # a process that was started in the background ignores SIGINT
try:
    with StopRequest() as request:
        assert not request.requested
        os.kill(os.getpid(), number)
        assert request.requested
        print("asked", flush=True)
        os.kill(os.getpid(), number)
        print("not reached")
except KeyboardInterrupt:
    print("ended", flush=True)
assert signal.getsignal(number) == before
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(int(number))], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["asked", "ended"]
    assert done.stderr.count("stopping") == 1


def test_each_context_starts_without_a_request() -> None:
    with StopRequest() as first:
        signal.raise_signal(signal.SIGTERM)
    with StopRequest() as second:
        assert first.requested and not second.requested


def test_a_run_that_is_ended_at_once_has_not_failed(
    little: Little, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(session, "Session", start)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, "trackers": [{"name": "lines"}]}))
    with pytest.raises(KeyboardInterrupt):
        train.train(tmp_path / "run.yaml", [f"trainer.run_dir={tmp_path / 'run'}"], resume=None, overwrite=False)
    assert capsys.readouterr().out.startswith("interrupted: 0 of 4 steps")
