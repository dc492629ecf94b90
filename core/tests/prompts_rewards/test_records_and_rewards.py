from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain import RewardSample, UserError
from drivetrain.builtin.configs import ExactMatchConfig, FunctionRewardConfig, JsonlConfig
from drivetrain.builtin.exact_match import ExactMatch
from drivetrain.builtin.function_reward import FunctionReward
from drivetrain.builtin.jsonl import JsonlDataset


def jsonl(folder: Path, *records: Any, **options: Any) -> JsonlDataset:
    path = folder / "train.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return JsonlDataset(JsonlConfig(name="jsonl", path=path, **options))


def test_records_become_examples(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2+2"}]
    first, second = jsonl(
        tmp_path, {"prompt": "1+1", "answer": 2, "level": 3}, "", {"prompt": chat, "answer": "4"}, {"x": 1}, limit=2
    )
    assert (first.prompt, first.answer, first.response, first.data_source) == ("1+1", "2", None, "train")
    assert first.extra == {"level": 3}
    assert second.prompt == chat


def test_keys_and_source_are_configurable(tmp_path: Path) -> None:
    record = {"q": {"text": "1+1"}, "a.b": "two", "left": True}
    options = {"prompt_key": "q.text", "answer_key": None, "response_key": "a.b", "data_source": "sums"}
    (example,) = jsonl(tmp_path, record, **options)
    assert (example.prompt, example.answer, example.response, example.data_source) == ("1+1", None, "two", "sums")


def test_a_preference_pair(tmp_path: Path) -> None:
    options = {"answer_key": None, "response_key": "chosen", "rejected_key": "rejected"}
    (example,) = jsonl(tmp_path, {"prompt": "1+1", "chosen": "2", "rejected": "3", "by": "me"}, **options)
    assert (example.response, example.rejected, example.extra) == ("2", "3", {"by": "me"})
    with pytest.raises(UserError, match="no key 'rejected'") as raised:
        jsonl(tmp_path, {"prompt": "1+1", "chosen": "2"}, **options)
    assert "set rejected_key" in str(raised.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{nope", r"no JSON: .* at column 2"),
        ("[1]", "no JSON object"),
        ({"prompt": "1"}, r"no key 'answer'"),
        ({"prompt": 3, "answer": "1"}, "'prompt' is 3, but must be text or a list of messages"),
        ({"prompt": [], "answer": "1"}, r"'prompt' is \[\]"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "'prompt' is"),
        ({"prompt": "1", "answer": None}, "'answer' is None, but must be text"),
        ({"prompt": "1", "answer": True}, "'answer' is True, but must be text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        jsonl(tmp_path, {"prompt": "1", "answer": "1"}, "", line)
    assert "train.jsonl:3)" in str(raised.value) and "what to do" in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the data file"):
        JsonlDataset(JsonlConfig(name="jsonl", path=tmp_path / "none.jsonl"))


def sample(response: str, answer: str | None = "Yes", finish_reason: str = "stop") -> RewardSample:
    return RewardSample(prompt="p", uid="0", response=response, response_token_ids=(1, 2), finish_reason=finish_reason,
                        answer=answer, data_source="s", extra={"bonus": 2.0})  # fmt: skip


@pytest.mark.parametrize(
    ("response", "finish", "options", "right"),
    [
        (" Yes\n", "stop", {}, True),
        (" Yes", "stop", {"strip": False}, False),
        ("yes", "stop", {}, False),
        ("yes", "stop", {"ignore_case": True}, True),
        ("Yes", "length", {}, False),
        ("Yes", "length", {"require_stop": False}, True),
        ("Yes.", "stop", {}, False),
    ],
)
def test_exact_match(response: str, finish: str, options: dict[str, Any], right: bool) -> None:
    reward = ExactMatch(ExactMatchConfig(name="exact_match", **options))
    assert reward([sample(response, finish_reason=finish)]) == [right]


SOURCE = """
from drivetrain import Score

def weighted(response: str, extra, *, factor: float, words: list[str] = ()) -> float:
    return factor * extra["bonus"] + len(words)

def judged(response, answer, finish_reason, response_token_ids, prompt, data_source):
    return Score(len(response_token_ids), correct=response == answer)

def anything(response, **options):
    return float(options["a"])

def positional(*words):
    return 0.0

def unknown(response, kind: "Nowhere"):
    return 0.0

number = 3
"""


def reward(folder: Path, name: str, **args: Any) -> FunctionReward:
    (folder / "mine.py").write_text(SOURCE)
    return FunctionReward(FunctionRewardConfig(name="function", path=f"{folder}/mine.py:{name}", args=args))


def test_a_function_gets_what_it_names(tmp_path: Path) -> None:
    assert reward(tmp_path, "weighted", factor="1.5", words=["a"])([sample("x")]) == [4.0]
    (score,) = reward(tmp_path, "judged")([sample("Yes")])
    assert (score.value, score.correct) == (2, True)
    assert reward(tmp_path, "anything", a=2)([sample("x")]) == [2.0]


def test_a_function_of_a_module_and_of_a_relative_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward(tmp_path, "weighted", factor=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("mine:weighted", "./mine.py:weighted"):
        config = FunctionRewardConfig(name="function", path=path, args={"factor": 1})
        assert FunctionReward(config)([sample("x")]) == [2.0]


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("weighted", {}, "factor missing"),
        ("weighted", {"factor": "high"}, "factor Input should be a valid number"),
        ("weighted", {"factor": 1, "words": ["a", 3]}, "words.1 Input should be a valid string"),
        ("weighted", {"factor": 1, "words": 3, "speed": 3}, "speed unknown"),
        ("weighted", {"factor": 1, "response": "x"}, "args sets response, which come from the sample"),
        ("judged", {"x": 1}, "takes no arguments besides fields of the sample"),
        ("positional", {}, "parameter 'words' cannot be given by name"),
        ("unknown", {"kind": 1}, "annotation of the reward function is not known: name 'Nowhere'"),
        ("number", {}, "'number' is no function"),
        ("absent", {}, "cannot load the reward function: AttributeError"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path: Path, name: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        reward(tmp_path, name, **args)
    assert said in " ".join(str(raised.value).split()) and f"mine.py:{name}" in str(raised.value)


@pytest.mark.parametrize("path", ["nowhere:f", "./nowhere.py:f", "f", ":f"])
def test_a_function_that_is_not_there(path: str) -> None:
    with pytest.raises(UserError, match="cannot load the reward function"):
        FunctionReward(FunctionRewardConfig(name="function", path=path))
