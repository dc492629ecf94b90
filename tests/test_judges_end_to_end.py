"""GRPO with a judging language model as reward from the command line, and what stops such a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins/judges/tests"))

from judge_server import Reply, serving

SMALL = ["data.batch_prompts=10", "data.eval.limit=5", "algorithm.group_size=3", "trainer.steps=2"]
SHOWN = "api_key_env: JUDGE_KEY, template: '{prompt}|{response}', pattern: '(.+)'"


def reward(name: str, url: str, more: str = SHOWN) -> str:
    return f"{{name: {name}, base_url: '{url}', model: judge, {more}}}"


def digits(response: str) -> float:
    """10 for as many digits as there are characters, in proportion."""
    return 10 * sum(character.isdigit() for character in response) / max(1, len(response))


def answer(text: str, _: int) -> Reply:
    prompt, *responses = text.split("|")
    assert prompt.endswith("=")
    if len(responses) == 1:
        return Reply(f"{digits(responses[0]):.6f}")
    a, b = map(digits, responses)
    return Reply("tie" if a == b else "A" if a > b else "B")


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_judges_beside_a_rule(tmp_path: Path, drivetrain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    _, grpo = tiny.write_configs(tmp_path)
    run_dir = tmp_path / "run"
    with serving(answer) as (url, server):
        pairs = SHOWN.replace("{response}", "{response_a}|{response_b}") + ", weight: 0.5, opponents: 2, label: wins"
        rewards = (f"rewards=[{{name: exact_match}}, {reward('llm_judge', url, SHOWN + ', weight: 0.25')}, "
                   f"{reward('llm_preference', url, pairs)}]")  # fmt: skip
        drivetrain("train", grpo, *SMALL, rewards, f"trainer.run_dir={run_dir}")
        more = drivetrain("train", run_dir / "config.yaml", "trainer.steps=3", "--resume", "auto")
    rows = metrics_of(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        parts = [row[f"train/reward/{name}"] for name in ("exact_match", "llm_judge", "wins")]
        assert row["train/reward"] == pytest.approx(parts[0] + 0.25 * parts[1] + 0.5 * parts[2], abs=1e-5)
        assert 0 < parts[1] < 1 and parts[2] == pytest.approx(0.5) and row["train/grad_norm"] > 0
    assert rows[-1]["eval/reward/wins"] == 0.5  # one sample of each prompt is drawn
    samples = [json.loads(line) for line in next(run_dir.glob("samples*")).read_text().splitlines()]
    for sample in samples:
        expected = float(sample["correct"]) + 0.025 * digits(sample["response"]) + 0.25
        assert sample["score"] == pytest.approx(expected, abs=1e-5)
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer sk-secret"}
    assert "api_key_env: JUDGE_KEY" in (run_dir / "config.yaml").read_text()
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert files and not any(b"sk-secret" in path.read_bytes() for path in files)
    assert "sk-secret" not in more.stdout + more.stderr


def test_an_endpoint_that_refuses_or_hangs_stops_the_run(
    tmp_path: Path, drivetrain: Any, drivetrain_process: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    _, grpo = tiny.write_configs(tmp_path)
    with serving(lambda text, n: Reply(status=401, body='{"error": "no such key: sk-secret"}')) as (url, _):
        out = drivetrain("train", grpo, *SMALL, f"rewards=[{reward('llm_judge', url)}]", code=1)
    assert f"reward 'llm_judge' raised JudgeError: {url}/chat/completions answered 401" in out.stderr
    assert "mend the key in JUDGE_KEY" in out.stderr and "sample" in out.stderr and "Traceback" not in out.stderr
    assert "sk-secret" not in out.stdout + out.stderr
    with serving(lambda text, n: (server.ending.wait(60), Reply("1"))[1]) as (url, server):
        slow = f"rewards=[{reward('llm_judge', url, SHOWN + ', timeout_s: 1')}]"
        out = drivetrain_process("train", grpo, *SMALL, slow, "--overwrite", code=1)
    assert "took longer than timeout_s=1" in out.stderr and len(server.asked) == 5
    assert "Traceback" not in out.stderr and "destroyed" not in out.stderr  # what still waits ends in silence


def test_what_is_wrong_is_said_before_the_first_step(tmp_path: Path, drivetrain: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    sft, grpo = tiny.write_configs(tmp_path)
    out = drivetrain("train", grpo, *SMALL, f"rewards=[{reward('llm_judge', 'http://127.0.0.1:9/v1')}]", code=2)
    assert "the environment variable JUDGE_KEY is not set" in out.stderr and "llm_judge.api_key_env" in out.stderr
    wrong = "api_key_env: sk-secret, template: '{promt} {response}'"
    out = drivetrain("train", grpo, f"rewards=[{reward('llm_judge', 'http://h/v1', wrong)}]", code=2)
    assert "no placeholder {promt}; it takes {prompt}" in out.stderr and "rewards.0.template" in out.stderr
    assert "name of an environment variable, not a key" in out.stderr and "sk-secret" not in out.stderr
    out = drivetrain("train", sft, f"rewards=[{reward('llm_preference', 'http://h/v1', 'opponents: 2')}]", code=2)
    assert "algorithm 'sft' draws one sample a prompt" in out.stderr
