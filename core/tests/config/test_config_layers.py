"""Layers: file, environment, command line; what wins, and where it came from."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest
from little_engines import RUN, Load

from drivetrain.config.layers import command_line_layer, dump_value, nested, parse_value
from drivetrain.config.resolve import load_config
from drivetrain.seam.registry import Registry


def test_a_file_alone(load: Load) -> None:
    resolved = load()
    run = resolved.run
    assert run.algorithm.name == "group" and run.algorithm.samples_per_prompt() == 1
    assert run.actor.optimizer.lr == 3e-4
    assert run.data.train.path == Path("train.jsonl")  # type: ignore[attr-defined]
    assert [reward.name for reward in run.rewards] == ["exact_match", "words"]
    assert run.rewards[1].words == ("yes it is", "no")  # type: ignore[attr-defined]
    assert (run.executor.name, run.hardware.name, run.hybrid_engine.name) == ("local", "auto", "shared")
    assert [tracker.name for tracker in run.trackers] == ["jsonl", "lines"]
    assert resolved.notes == ()


def test_file_then_environment_then_command_line(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_TRAINER__STEPS", "20")
    monkeypatch.setenv("drivetrain_actor__optimizer__LR", "1e-5")
    monkeypatch.setenv("DRIVETRAIN_TRAINER__SEED", "5")
    resolved = load("trainer.steps=30", "trainer.steps=31")
    assert (resolved.run.trainer.steps, resolved.run.trainer.seed) == (31, 5)
    assert resolved.run.actor.optimizer.lr == 1e-5
    origins = {key: str(origin) for key, origin in resolved.origins.items()}
    assert origins["trainer.steps"] == "command line"
    assert origins["trainer.seed"] == "environment DRIVETRAIN_TRAINER__SEED"
    assert origins["actor.optimizer.lr"] == "environment DRIVETRAIN_ACTOR__OPTIMIZER__LR"
    assert origins["algorithm.group_size"] == "run.yaml:5"
    assert origins["rewards.1.words.1"] == "run.yaml:19"
    assert origins["executor.name"] == "default"


def test_the_environment_alone_may_give_a_whole_config(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_MODEL", "{path: some/model}")
    monkeypatch.setenv("DRIVETRAIN_MODEL__DTYPE", "bfloat16")
    monkeypatch.setenv("DRIVETRAIN_ALGORITHM__NAME", "imitate")
    monkeypatch.setenv("DRIVETRAIN_ACTOR", "{backend: {name: mini}, optimizer: {name: bare, lr: 1}}")
    monkeypatch.setenv("DRIVETRAIN_DATA", "{batch_prompts: 4, train: {name: jsonl, path: train.jsonl}}")
    monkeypatch.setenv("DRIVETRAIN_ROLLOUT", "{name: say, max_response_tokens: 5, stop: ['1']}")
    run = load_config(None, ["trainer.steps=1"], registry).run
    assert (str(run.model.path), run.model.dtype, run.actor.optimizer.lr) == ("some/model", "bfloat16", 1.0)
    assert run.rollout is not None and run.rollout.stop == ("1",)


def test_a_list_is_replaced_and_an_element_overridden(load: Load) -> None:
    replaced = load("rewards=[{name: words}]").run.rewards
    assert [reward.name for reward in replaced] == ["words"]
    assert replaced[0].words == ()  # type: ignore[attr-defined]
    changed = load("rewards.1.weight=2", "rewards.1.label=w").run.rewards
    assert [(r.name, r.weight, r.label) for r in changed] == [("exact_match", 1.0, None), ("words", 2.0, "w")]
    appended = load("rewards.2={name: words, label: again}").run.rewards
    assert [reward.name for reward in appended] == ["exact_match", "words", "words"]
    later = load("rewards.0.weight=3", "rewards=[{name: exact_match}]").run.rewards
    assert [reward.weight for reward in later] == [1.0], "a later word replaces what an earlier one set"


def test_a_mapping_is_merged_and_an_empty_one_empties(load: Load) -> None:
    text = RUN.replace("group_size: 4", "extras: {a: 1, 2: two, on: [x]}")
    assert load(text=text).run.algorithm.extras == {"a": 1, "2": "two", "on": ["x"]}  # type: ignore[attr-defined]
    assert load("algorithm.extras={b: 3}").run.algorithm.extras["b"] == 3  # type: ignore[attr-defined]
    assert load("algorithm.extras={}").run.algorithm.extras == {}  # type: ignore[attr-defined]


def test_null_takes_a_section_away(load: Load) -> None:
    text = RUN + "ref: {backend: {name: mini}}\n"
    assert load("ref=null", text=text).run.ref is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("1E5", 1e5), (".5", 0.5), ("10", 10), ("true", True), ("null", None), ("", None),
        ("[1, a]", [1, "a"]), ("{a: 1}", {"a": 1}), ("'10'", "10"), ("a b", "a b"),
        ("acme-dapo:dapo", "acme-dapo:dapo"),
        ("1.2.3", "1.2.3"), ("e5", "e5"),
    ],
)  # fmt: skip
def test_values(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_words_of_the_command_line() -> None:
    layer = command_line_layer(["a.b=1", "a.c.0={d: x=y}", "a.b=2"])
    assert nested(layer.values) == {"a": {"b": 2, "c": [{"d": "x=y"}]}}


def test_aliases(load: Load) -> None:
    text = RUN.replace("    lr: 3e-4\n", "").replace("rollout: {name: say, ", "their:\n  sampling: {name: say, ")
    text = text.replace("rewards:", "  judges:").replace("data:\n", "  optim: {lr: 0.5}\ndata:\n")
    resolved = load("their.sampling.temperature=0.7", text=text.replace("  judges:", "rewards:"))
    assert resolved.run.actor.optimizer.lr == 0.5
    assert resolved.run.rollout is not None and resolved.run.rollout.temperature == 0.7
    assert str(resolved.origins["actor.optimizer.lr"]) == "run.yaml:13"
    assert [r.name for r in load("their.judges=[{name: words}]").run.rewards] == ["words"], "a list stays a list"
    assert load("actor.optimizer.lr=2").run.actor.optimizer.lr == 2, "a higher layer wins by whatever words"


def test_the_result_is_frozen(load: Load) -> None:
    run = load().run
    for section, key in ((run, "trainer"), (run.trainer, "steps"), (run.algorithm, "group_size")):
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(section, key, 1)


@pytest.mark.parametrize(
    "value",
    ["3e-4", "1e3", "10", "", " a", "a: b", "#", "...", "null", "no", "line\n  two\n\n", "é", 3e-4, 1e22, -0.5, 7, True,
     None, [], {}, ["a", {"b": ["c", None]}], {"on": "x\ny"}],
)  # fmt: skip
def test_what_is_written_is_read_back(value: object) -> None:
    text = dump_value(value)
    assert parse_value(text) == value and "\n" not in text
    assert parse_value(dump_value({"key": [value]}, default_flow_style=False)) == {"key": [value]}
