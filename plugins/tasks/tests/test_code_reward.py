from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import DataProto, RewardError, Score, UserError
from drivetrain.builtin.per_sample import SampleError
from drivetrain.driver.rewarding import PanelReward, RewardPanel
from drivetrain_tasks import code_reward, programs
from drivetrain_tasks.code_reward import CodeReward, last_block
from drivetrain_tasks.configs import CodeRewardConfig
from drivetrain_tasks.programs import NoStart, Refused

RIGHT, WRONG = Score(1.0, correct=True), Score(0.0, correct=False)
TESTS = ["assert add(1, 2) == 3", "assert add('ü', '→') == 'ü→'", "assert add(0.5, 0) == 0.5"]
ADD = "def add(a, b):\n    return a + b\n"


def make(**options: Any) -> CodeReward:
    """With programs that have the network, as not every machine grants namespaces; the response is the program."""
    return CodeReward(CodeRewardConfig(name="code", **{"network": "allow", "extract": "response", **options}))


@pytest.fixture(scope="module")
def asserts() -> CodeReward:
    return make()


@pytest.fixture(scope="module")
def stdio() -> CodeReward:
    return make(kind="stdio")


def pairs(*tests: tuple[str, str]) -> str:
    return json.dumps([{"input": given, "output": wanted} for given, wanted in tests])


# -- the program in a response --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("so:\n```python\na = 1\n```\nor\n```\na = 2\n```\ndone", "a = 2\n"),
        ("```python\na = 1\n```\n```text\n1\n```", "a = 1\n"),
        ("```py\na = 1\n\n  ```", "a = 1\n\n"),
        ("```Python3\na = '''```x'''\n```", "a = '''```x'''\n"),
        ("```python\na = 1\n```\nand\n```python\nb = ", "a = 1\n"),
        ("```python\r\na = 1\r\n```", "a = 1\r\n"),
        ("```bash\nls\n```", None),
        ("a = 1", None),
        ("", None),
    ],
)
def test_the_last_block_of_python(response: str, program: str | None) -> None:
    assert last_block(response) == program


def test_a_response_without_a_program_is_wrong_and_a_cut_one_too(sample: Any) -> None:
    reward = make(extract="block")
    block, tests = f"```python\n{ADD}```", json.dumps(TESTS)
    assert reward([sample(block, tests), sample(ADD, tests)]) == [RIGHT, WRONG]
    assert reward([sample(block, tests, finish_reason="length")]) == [WRONG]
    assert make(extract="block", require_stop=False)([sample(block, tests, finish_reason="length")]) == [RIGHT]


# -- asserts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "right"),
    [
        (ADD, True),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n" + ADD, True),
        ("# ünïcödé → 🙂\nprint('🙂')\n" + ADD, True),
        ("if __name__ == '__main__':\n    input()\n" + ADD, True),
        ("def add(a, b):\n    return a - b", False),
        ("def add(a, b:", False),
        ("a = '\ud800'\n" + ADD, False),
        ("a = '\0'\n" + ADD, False),
        ("raise ValueError", False),
        ("", False),
    ],
)
def test_what_passes_the_asserts(asserts: CodeReward, sample: Any, program: str, right: bool) -> None:
    assert asserts([sample(program, json.dumps(TESTS))]) == [RIGHT if right else WRONG]


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "def add(a, b):\n    raise SystemExit(0)",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "import ctypes\nctypes.string_at(0)",
        "import os\nfor fd in range(3, 20):\n    try:\n        os.write(fd, b'x ready\\nx 0\\nx 1\\nx 2\\n')\n"
        "    except OSError:\n        pass\nos._exit(0)",
        "print('0\\n1\\n2', flush=True)",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None",
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.BaseException = ()",
        "import os\nos.write = lambda *a: 0\nos._exit = lambda code: None",
        "__builtins__ = {'__build_class__': None}\ndef add(a, b):\n    return 0",
        "import atexit, os\natexit.register(os._exit, 0)",
        "import os\nif os.fork():\n    os._exit(0)\nos._exit(0)",
        "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b):\n    return add(a, b)",
    ],
)
def test_what_does_not_pass_for_right(sample: Any, program: str) -> None:
    assert make(time_limit_s=2)([sample(program, json.dumps(TESTS))]) == [WRONG]


def test_builtins_that_the_program_replaced_are_back_for_the_tests(asserts: CodeReward, sample: Any) -> None:
    program = "import builtins\nbuiltins.abs = builtins.len = lambda x: 3"
    assert asserts([sample(program, "assert abs(-3) == 3"), sample(program, "assert len('') == 3")]) == [RIGHT, WRONG]


def test_tests_are_a_list_or_a_script_in_the_answer_or_elsewhere(asserts: CodeReward, sample: Any) -> None:
    script = "def check(add):\n    assert add(1, 2) == 3\ncheck(add)"
    assert asserts([sample(ADD, script), sample("add = max", script)]) == [RIGHT, WRONG]
    nested, flat = make(tests_key="spec.tests"), {"spec.tests": ["assert False"]}
    assert nested([sample(ADD, extra={"spec": {"tests": TESTS}}), sample(ADD, extra=flat)]) == [RIGHT, WRONG]


def test_a_fraction_counts_the_tests_before_a_hang(sample: Any) -> None:
    reward, tests = make(score="fraction", time_limit_s=2), json.dumps(["assert f(1)", "assert f(2)", "f(0)", "f(1)"])
    assert reward([sample("def f(x):\n    return x == 1", tests)]) == [Score(0.75, correct=False)]
    assert reward([sample("def f(x):\n    while not x: pass\n    return x", tests)]) == [Score(0.5, correct=False)]
    assert reward([sample("def f(x):\n    return True", tests)]) == [RIGHT]


# -- standard input and output --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("print(sum(map(int, input().split())))", True),
        ("print(' ', sum(map(int, input().split())), '\\r\\n\\n')", True),
        ("import sys\nprint(eval(sys.stdin.read().replace(' ', '+')), end='')\nsys.exit(0)", True),
        ("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", True),
        ("print(3)", False),
        ("print(sum(map(int, input().split())))\nraise ValueError", False),
        ("print(sum(map(int, input().split())))\nimport sys\nsys.exit(1)", False),
        ("print(sum(map(int, input().split())), file=__import__('sys').stderr)", False),
        ("", False),
    ],
)
def test_what_a_script_has_to_print(stdio: CodeReward, sample: Any, program: str, right: bool) -> None:
    assert stdio([sample(program, pairs(("1 2\n", "3\n"), ("10 -4", "6")))]) == [RIGHT if right else WRONG]


def test_lines_are_compared_one_by_one_and_the_text_is_unicode(stdio: CodeReward, sample: Any) -> None:
    tests = pairs(("ä 🙂\n", "ä\n🙂"))
    scores = stdio([sample("print(*input().split(), sep=' \\n')", tests), sample("print(input())", tests)])
    assert scores == [RIGHT, WRONG]


def test_a_large_input_is_no_deadlock(stdio: CodeReward, sample: Any) -> None:
    assert stdio([sample("print(len(input()))", pairs(("x" * 10**6, "1000000")))]) == [RIGHT]
    assert stdio([sample("print(1)", pairs(("x" * 10**6, "1")))]) == [RIGHT]


def test_a_fraction_of_pairs(sample: Any) -> None:
    reward, tests = make(kind="stdio", score="fraction"), pairs(("1", "1"), ("2", "4"), ("3", "9"), ("4", "16"))
    assert reward([sample("n = int(input())\nprint(n * n if n != 2 else 5)", tests)]) == [Score(0.75, correct=False)]


# -- errors that are nobody's score ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "answer", "extra", "message"),
    [
        ({}, None, {}, "tests in 'answer' are None"),
        ({}, "", {}, "no tests"),
        ({}, "[]", {}, "no tests"),
        ({}, "[1]", {}, "not assert statements"),
        ({}, "assert (", {}, "no Python"),
        ({"tests_key": "a.b"}, "assert add", {"a": {}}, "no key 'a.b' among a"),
        ({"kind": "stdio"}, "[]", {}, "no tests"),
        ({"kind": "stdio"}, "3", {}, "not a list of {input"),
        ({"kind": "stdio"}, "no json", {}, "not a list of {input"),
        ({"kind": "stdio"}, '[{"input": "1"}]', {}, "not a list of {input"),
    ],
)
def test_a_sample_without_usable_tests_is_an_error(
    sample: Any, options: Any, answer: Any, extra: Any, message: str
) -> None:
    reward = make(**options)
    for response in (ADD, "sys.exit(0"):
        with pytest.raises(ValueError, match=message):
            reward.judge(sample(response, answer, extra=extra))


def test_an_error_stops_the_batch_at_its_sample(sample: Any) -> None:
    with pytest.raises(SampleError) as raised:
        make(max_concurrency=1)([sample(ADD, TESTS[0]), sample(ADD, ""), sample(ADD, None)])
    assert raised.value.index == 1
    assert "no tests" in str(raised.value.__cause__)


def test_a_machine_that_cannot_start_programs_is_an_error(
    asserts: CodeReward, sample: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="missing"):
        patch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        asserts.judge(sample(ADD, TESTS[0]))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="missing"):
        patch.setattr(programs.sys, "executable", str(tmp_path / "missing"))
        asserts.judge(sample(ADD, TESTS[0]))
    broken = tmp_path / "guard.py"
    broken.write_text("raise RuntimeError('out of order')")
    with monkeypatch.context() as patch, pytest.raises(NoStart, match="out of order"):
        patch.setattr(programs, "_GUARD", broken)
        asserts.judge(sample(ADD, TESTS[0]))


def test_limits_that_leave_no_room_are_refused_at_the_start() -> None:
    with pytest.raises(UserError, match="cannot run programs"):
        make(memory_mb=1)


def test_a_machine_without_namespaces_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="not permitted"):
        programs._outcome("refused Operation not permitted\n", isolated=True)

    def refuse(*_: Any, **__: Any) -> None:
        raise Refused("Operation not permitted")

    monkeypatch.setattr(code_reward, "run_program", refuse)
    with pytest.raises(UserError, match="cut programs off") as raised:
        make(network="deny")
    assert "network: allow" in str(raised.value.message())


# -- batches --------------------------------------------------------------------------------------------------------


def test_scores_are_in_order_whatever_ends_first(sample: Any) -> None:
    programs_ = [f"import time\ntime.sleep({0.4 if n % 3 == 0 else 0})\nn = {n}" for n in range(9)]
    scores = make(max_concurrency=4)([sample(program, "assert n % 2 == 0") for program in programs_])
    assert scores == [RIGHT if n % 2 == 0 else WRONG for n in range(9)]


class Letters:
    """A tokenizer of characters."""

    eos_token_id, all_special_ids = 0, (0,)

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(i) for i in ids if i)

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        return [self.decode(row) for row in rows]


def batch(responses: list[str], answer: str | None) -> DataProto:
    longest, rows = max(map(len, responses)) + 1, len(responses)
    ids, mask = torch.zeros(rows, longest, dtype=torch.int64), torch.zeros(rows, longest, dtype=torch.int64)
    for row, text in enumerate(responses):
        ids[row, : len(text)], mask[row, : len(text) + 1] = torch.tensor([ord(c) for c in text]), 1
    texts = {
        "raw_prompt": ["p"] * rows, "uid": ["0"] * rows, "messages": [None] * rows, "answer": [answer] * rows,
        "data_source": ["s"] * rows,
        "extra": [{}] * rows, "finish_reason": ["stop"] * rows,
    }  # fmt: skip
    return DataProto.from_dict({"responses": ids, "response_mask": mask}, texts)


def test_in_a_panel(asserts: CodeReward) -> None:
    panel = RewardPanel([PanelReward(label="code", reward=asserts)], Letters())
    scored = panel.score(batch([ADD, "import sys; sys.exit(0)", ADD.replace("+", "-")], json.dumps(TESTS)))
    assert scored["reward/code"].tolist() == scored["correct"].tolist() == [1, 0, 0]
    with pytest.raises(RewardError, match="has no tests"):
        panel.score(batch([ADD], ""))
