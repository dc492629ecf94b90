from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from drivetrain import PluginConfig, PluginSpec, UserError
from drivetrain_judges import plugin
from drivetrain_judges.configs import LLMJudgeConfig, LLMPreferenceConfig
from drivetrain_judges.endpoint import Endpoint

SPECS = [*plugin.drivetrain_rewards()]
WHERE: dict[str, Any] = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_what_a_spec_names_is_there(spec: PluginSpec) -> None:
    assert spec.config is not None
    factory, config = (_load(name) for name in (spec.factory, spec.config))
    assert callable(factory) and issubclass(config, PluginConfig)
    assert all(field.description for name, field in config.model_fields.items() if name != "name")
    read_again = config.model_validate(config(name=spec.name, **WHERE).model_dump())  # as from a run's folder
    assert read_again == config(name=spec.name, **WHERE)


def _load(name: str) -> type:
    module, _, attribute = name.partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found


def test_listing_and_configs_import_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "openai", "httpx", "httpx2", "aiolimiter")
    code = f"""
import sys, drivetrain_judges.plugin as plugin, drivetrain_judges.configs
list(plugin.drivetrain_rewards())
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        (LLMJudgeConfig, {"base_url": "localhost:8000/v1"}, "begin with http:// or https://"),
        (LLMJudgeConfig, {"base_url": "https://me:secret@host/v1"}, "holds a user"),
        (LLMJudgeConfig, {"base_url": "https://host/v1?api-key=secret"}, "holds a user, a query"),
        (LLMJudgeConfig, {"api_key_env": "sk-secret"}, "the name of an environment variable, not a key"),
        (LLMJudgeConfig, {"template": "{prompt} {respnse} {response}"}, r"no placeholder \{respnse\}; it takes"),
        (LLMJudgeConfig, {"template": "{prompt}"}, r"lacks \{response\}"),
        (LLMJudgeConfig, {"pattern": "Score: .+"}, "has 0 groups"),
        (LLMJudgeConfig, {"pattern": "(a)(b)"}, "has 2 groups"),
        (LLMJudgeConfig, {"pattern": "("}, "no regular expression"),
        (LLMJudgeConfig, {"pattern": "(a)", "json_key": "score"}, "not both"),
        (LLMJudgeConfig, {"extra_body": {"model": "other"}}, "cannot set model"),
        (LLMJudgeConfig, {"minimum": 10}, "minimum must be less"),
        (LLMJudgeConfig, {"correct_above": 10}, "correct_above must be"),
        (LLMPreferenceConfig, {"template": "{prompt} {response_a}"}, r"lacks \{response_b\}"),
        (LLMPreferenceConfig, {"opponents": 3}, "multiple of 2"),
    ],
)
def test_settings_that_cannot_be_meant(model: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        model(name="x", **{**WHERE, **settings})


def test_braces_of_json_in_a_template_stand_for_themselves() -> None:
    assert LLMJudgeConfig(name="x", template='{response} {"score": 7} {}', **WHERE)


@pytest.mark.parametrize(("value", "said"), [(None, "is not set"), (" ", "is not set, or empty"), ("a b", "no key")])
def test_a_key_that_is_not_there(monkeypatch: pytest.MonkeyPatch, value: str | None, said: str) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    config = LLMJudgeConfig(name="llm_judge", label="taste", api_key_env="JUDGE_KEY", **WHERE)
    with pytest.raises(UserError, match=f"JUDGE_KEY .*{said}") as raised:
        Endpoint(config, float)
    assert raised.value.where == "rewards: taste.api_key_env" and "a b" not in str(raised.value)
