"""The reward ``code``."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain import PerSample, RewardSample, Score, UserError
from drivetrain_tasks.programs import Limits, NoStart, Outcome, Refused, run_program

if TYPE_CHECKING:
    from drivetrain_tasks.configs import CodeRewardConfig

_MARK = "```"


class CodeReward(PerSample):
    """Runs the Python program in a response against tests: 1 if all pass, else 0, or the share that passes.

    ``asserts``: the program is a module, and each test a text that runs in it after it, and passes unless it raises.
    ``stdio``: the program is a script that runs once a test on the test's input, and passes if it exits with 0 and
    prints the test's output; white space at the ends of lines and of the whole makes no difference.

    Whatever the program does is its own failure. A sample without tests, a test that is no Python, a machine that
    cannot run programs are errors.
    """

    def __init__(self, config: CodeRewardConfig) -> None:
        """Raises UserError where this machine cannot run programs within the limits."""
        self._config = config
        self._limits = Limits(
            time_limit_s=config.time_limit_s, memory_mb=config.memory_mb, file_mb=config.file_mb,
            output_kb=config.output_kb, max_processes=config.max_processes, isolate=config.network == "deny",
        )  # fmt: skip
        _try_machine(self._limits)

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score | float]:
        outcomes = _in_parallel(self.judge, samples, self._config.max_concurrency or len(os.sched_getaffinity(0)))
        return _Found(outcomes)(samples)

    def judge(self, sample: RewardSample) -> Score:
        config = self._config
        key = "answer" if config.tests_key is None else config.tests_key
        read: Callable[[object, str], Sequence[Any]] = _read_asserts if config.kind == "asserts" else _read_pairs
        tests = read(sample.answer if config.tests_key is None else _look_up(sample.extra, config.tests_key), key)
        source = sample.response if config.extract == "response" else last_block(sample.response)
        if source is None or (config.require_stop and sample.finish_reason != "stop"):
            return Score(0.0, correct=False)
        if config.kind == "asserts":
            passed = len(run_program(source, self._limits, tests=tests).passed)
        else:
            passed = 0
            for stdin, expected in tests:
                if _prints(run_program(source, self._limits, stdin=stdin), expected):
                    passed += 1
                elif config.score == "all":
                    break
        correct = passed == len(tests)
        return Score(passed / len(tests) if config.score == "fraction" else float(correct), correct=correct)


def last_block(response: str) -> str | None:
    """What the last closed fenced block holds that is marked as Python or not at all; None if there is none."""
    found: str | None = None
    block: list[str] | None = None
    language = ""
    for line in response.splitlines(keepends=True):
        text = line.strip()
        if block is None and text.startswith(_MARK):
            block, language = [], text.removeprefix(_MARK).strip().lower()
        elif block is not None and text == _MARK:
            found = "".join(block) if language in ("", "python", "python3", "py") else found
            block = None
        elif block is not None:
            block.append(line)
    return found


def _look_up(extra: Mapping[str, Any], key: str) -> object:
    value: Any = extra
    for part in [key] if key in extra else key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"the sample has no tests: no key {key!r} among {', '.join(extra) or 'none'}")
        value = value[part]
    return value


def _read_asserts(value: object, key: str) -> Sequence[str]:
    """The tests of a list, of a list written as JSON, or of one script."""
    tests = value
    if isinstance(value, str):
        try:
            tests = json.loads(value)
        except ValueError:
            tests = None
        tests = tests if isinstance(tests, list) else [value]
    if not isinstance(tests, list | tuple) or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"the tests in {key!r} are {value!r:.100}, not assert statements, as a list or one text")
    if not any(test.strip() for test in tests):
        raise ValueError(f"the sample has no tests: {key!r} is empty")
    for test in tests:
        try:
            compile(test, key, "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the test {test!r:.200} in {key!r} is no Python: {error}") from error
    return tests


def _read_pairs(value: object, key: str) -> Sequence[tuple[str, str]]:
    """``(input, output)`` of each test, from a list or a list written as JSON."""
    tests = value
    if isinstance(value, str):
        try:
            tests = json.loads(value)
        except ValueError:
            tests = None
    if not isinstance(tests, list | tuple) or not all(
        isinstance(test, Mapping) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str)
        for test in tests
    ):
        raise ValueError(f"the tests in {key!r} are {value!r:.100}, not a list of {{input: text, output: text}}")
    if not tests:
        raise ValueError(f"the sample has no tests: {key!r} is empty")
    return [(test["input"], test["output"]) for test in tests]


def _prints(outcome: Outcome, expected: str) -> bool:
    if outcome.status != "ended" or outcome.exit_code != 0:
        return False
    shown, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (outcome.output, expected))
    return shown == wanted


def _try_machine(limits: Limits) -> None:
    try:
        outcome = run_program("works = True", limits, tests=["assert works"])
    except Refused as error:
        raise UserError(f"this machine cannot cut programs off from the network: {error}", where="network",
                        mend="allow user namespaces on this machine (containers often forbid them), or set network: "
                             "allow; a program then reaches the network and the other processes of its "
                             "user") from error  # fmt: skip
    except (NoStart, OSError) as error:
        raise UserError(f"this machine cannot run programs: {error}", where="reward code",
                        mend="raise memory_mb if it ran out of memory; the reward needs Linux with /proc "
                             "and a temporary folder that it may write to") from error  # fmt: skip
    if not outcome.passed:
        raise UserError(f"the limits leave no room for an empty program: {outcome.status}", where="reward code",
                        mend="raise time_limit_s or memory_mb")  # fmt: skip


class _Found(PerSample):
    """Judgements made before; an error is raised at the sample that it is about."""

    def __init__(self, outcomes: Sequence[Score | BaseException | None]) -> None:
        self._outcomes = iter(outcomes)

    def judge(self, sample: RewardSample) -> Score:
        outcome = next(self._outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None  # only samples after one that failed are not judged
        return outcome


def _in_parallel(
    judge: Callable[[RewardSample], Score], samples: Sequence[RewardSample], threads: int
) -> list[Score | BaseException | None]:
    """The score of each sample, or what it raised; after the first error no further sample is begun."""
    outcomes: list[Score | BaseException | None] = [None] * len(samples)
    waiting: Iterator[tuple[int, RewardSample]] = iter(list(enumerate(samples)))
    lock, failed = threading.Lock(), threading.Event()

    def work() -> None:
        while not failed.is_set():
            with lock:
                index, sample = next(waiting, (-1, None))
            if sample is None:
                return
            try:
                outcomes[index] = judge(sample)
            except BaseException as error:
                outcomes[index] = error
                failed.set()

    # As daemons they do not keep a process that gives up waiting alive; the programs end with the process.
    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(samples)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outcomes
