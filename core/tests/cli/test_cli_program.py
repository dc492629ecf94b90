"""Exit codes, messages and the commands of plugins."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["fail", "user"], 2, "error: wrong\n  what to do   mend it\n"),
        (["fail", "run"], 1, "error: broke\n"),
        (["fail", "bug"], 1, "error: KeyError: 'key'\n  this was not foreseen; --traceback shows where it happened\n"),
        (["fail", "exit"], 7, ""),
        (["fail", "fine"], 0, ""),
        (["fail", "interrupt"], 130, ""),
        (["fail", "abort"], 130, "stopped\n"),
        (["train", "missing.yaml"], 2, "missing.yaml"),
        (["eval", "missing"], 2, "no complete checkpoint"),
        (["train", "--sped"], 2, "No such option: --sped"),
        (["greet", "you", "--lod"], 2, "No such option: --lod"),
        (["greet"], 2, "Missing argument"),
        (["generate", "run", "--samples", "0"], 2, "--samples"),
        (["trane"], 2, "No such command 'trane'"),
        (["broken"], 2, "acme-tools 1.0 does not import"),
    ],
)
def test_exit_codes(program, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str) -> None:
    assert program(*words) == code
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


def test_the_end_of_a_file_is_a_failure_and_no_wish_to_stop(program, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("fail", "eof") == 1
    assert "error: EOFError: file is cut off" in capsys.readouterr().err


@pytest.mark.parametrize("how, code", [("user", 2), ("bug", 1), ("eof", 1)])
@pytest.mark.parametrize("place", [0, 2])
def test_a_traceback_can_be_had(program, capsys: pytest.CaptureFixture[str], how: str, code: int, place: int) -> None:
    words = ["fail", how]
    words.insert(place, "--traceback")
    assert program(*words) == code
    err = capsys.readouterr().err
    assert "Traceback" in err and "acme_tools" in err


def test_commands_of_plugins(program, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("greet", "you", "--loud", "--times", "2") == 0
    assert program("shelf", "put", "cup") == 0
    assert program("shelf", "take") == 0
    assert capsys.readouterr().out.splitlines() == ["HELLO you HELLO you", "put cup", "took"]


def test_help_of_plugins(program, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("--help") == program("greet", "--help") == program("shelf", "put", "--help") == 0
    out = capsys.readouterr().out
    assert "Does greet." in out and "Lacks its module." in out and "--loud" in out and "drivetrain shelf put" in out


def test_a_plugin_cannot_hide_a_command_of_core(program, capsys: pytest.CaptureFixture[str]) -> None:
    assert program("train", "you") == 2
    assert program("--help") == 0
    assert "hello" not in (out := capsys.readouterr().out) and "Hides" not in out


def test_the_process_ends_with_the_exit_code() -> None:
    program = [sys.executable, "-c", "from drivetrain.cli.main import main; main()"]
    codes = [
        subprocess.run([*program, word], capture_output=True, timeout=60).returncode for word in ("--version", "--no")
    ]
    assert codes == [0, 2]


def test_a_thread_that_computes_does_not_change_how_the_program_ends() -> None:
    script = (
        "import atexit, sys, torch\n"
        "from drivetrain.background import start_daemon\n"
        "from drivetrain.cli.main import main\n"
        "def compute():\n"
        "    numbers = torch.ones(200, 200)\n"
        "    while True: (numbers @ numbers).relu()\n"
        "start_daemon(compute, 'reward')\n"
        "atexit.register(print, 'at its end')\n"
        "sys.argv[1:] = ['config', 'no-such-file.yaml']\n"
        "main()\n"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: ") and done.stdout.endswith("at its end\n")
