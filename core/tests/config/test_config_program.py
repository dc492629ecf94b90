"""``drivetrain config`` and ``drivetrain schema``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from little_engines import RUN, Load, Program

from drivetrain.config.models import RunConfig
from drivetrain.config.resolve import load_config
from drivetrain.config.schema import run_schema
from drivetrain.seam.registry import Registry


def printed(program: Program, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert program(*words) == 0
    return capsys.readouterr().out


def test_config_prints_where_each_value_came_from(
    program: Program, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIVETRAIN_TRAINER__SEED", "5")
    text = printed(program, capsys, "config", "run.yaml", "trainer.steps=3", "algorithm.kl_coef=0.5")
    origins = {line.split("#")[0].strip(): line.split("# ")[-1] for line in text.splitlines()}
    assert origins["steps: 3"] == "command line"
    assert origins["seed: 5"] == "environment DRIVETRAIN_TRAINER__SEED"
    assert origins["group_size: 4"] == "run.yaml:5"
    assert origins["log_every: 1"] == "default"
    assert origins["words: [yes it is, 'no']"] == "run.yaml:19"
    derived = text[text.index("\nref:") :].splitlines()[3]
    assert (derived.split()[0], derived.split("# ")[1]) == ("name:", "derived from actor")
    assert text.startswith("# role ref derives from actor\n")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.name=critic", "rewards.0.label='10'"],
        ["algorithm.name=imitate", "rollout=null", "rewards=[]"],
        ["algorithm.kl_coef=1e-7", "algorithm.extras={a: {b: [1, {c: null}]}, 'on': yes, d: {}, e: []}"],
        ["rollout.stop=['#', 'a: b', ' ', '...', 'null']", "data.template='Q: {prompt} # A:'", "model.path='a b#c'"],
        ['data.template="line one\\n  {prompt}\\n\\nA: "', "trainer.run_dir='1e3'"],
    ],
)
def test_what_config_prints_loads_again(
    program: Program, load: Load, registry: Registry, capsys: pytest.CaptureFixture[str], overrides: list[str]
) -> None:
    Path("printed.yaml").write_text(printed(program, capsys, "config", "run.yaml", *overrides))
    again = load_config(Path("printed.yaml"), [], registry)
    assert again.run == load(*overrides).run
    assert again.notes == ()


@pytest.fixture(scope="module")
def schema(registry: Registry) -> dict[str, Any]:
    return json.loads(json.dumps(run_schema(RunConfig, registry)))


def wrong(schema: dict[str, Any], text: str) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(yaml.safe_load(text))]


def test_the_schema_is_one(schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["required"] == ["model", "algorithm", "actor", "data", "trainer"]


@pytest.mark.parametrize(
    "text",
    [
        RUN.replace("3e-4", "0.0003"),
        RUN.replace("3e-4", "0.1")
        + "rollout: null\ncritic: null\nref: {backend: {name: mini, sharding: {ranks: 2}}}\n",
        RUN.replace("3e-4", "0.1") + "trackers: [{name: lines}]\nexecutor: {name: local}\nhardware: {name: cpu}\n",
    ],
)
def test_the_schema_takes_a_valid_config(schema: dict[str, Any], text: str) -> None:
    assert wrong(schema, text) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("steps: 10", "stepz: 10"),
        ("group_size: 4", "group_sise: 4"),
        ("group_size: 4", "gamma: 0.5"),
        ("group_size: 4", "group_size: 1"),
        ("name: group", "name: gruop"),
        ("{name: mini}", "{name: mini, sharding: {rank: 1}}"),
        ("name: words", "name: jsonl"),
        ("model:\n", "extra: {}\nmodel:\n"),
        ("    lr: 3e-4\n", ""),
    ],
)
def test_the_schema_refuses_what_the_config_refuses(
    schema: dict[str, Any], registry: Registry, load: Load, old: str, new: str
) -> None:
    text = RUN.replace(old, new, 1)
    assert text != RUN
    assert wrong(schema, text.replace("3e-4", "0.0003"))
    with pytest.raises(Exception, match="unknown|missing|greater"):
        load(text=text)


def test_what_config_prints_fits_the_schema(
    program: Program, schema: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert wrong(schema, printed(program, capsys, "config", "run.yaml", "algorithm.kl_coef=0.5")) == []


def test_schema_writes_a_file(program: Program, capsys: pytest.CaptureFixture[str], schema: dict[str, Any]) -> None:
    assert json.loads(printed(program, capsys, "schema")) == schema
    assert printed(program, capsys, "schema", "--out", "schema.json") == "wrote schema.json\n"
    assert json.loads(Path("schema.json").read_text()) == schema


def test_a_kind_of_which_nothing_is_installed(registry: Registry) -> None:
    bare = Registry([])
    assert wrong(run_schema(RunConfig, bare), RUN.replace("3e-4", "0.1"))
    assert registry.names("environments") == []
