"""The quickstart's ingredients: small, disjoint, and selected without a surprise."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain import resolve
from drivetrain.config.resolve import load_config
from drivetrain.seam.registry import get_registry

EXAMPLES = Path(__file__).parent.parent / "examples" / "quickstart"


@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_no_prompt_is_in_training_and_in_evaluation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent.parent)
    run = load_config(EXAMPLES / f"{name}.yaml", [], get_registry()).run
    train, held_out = (
        {str(dataset[index].prompt) for index in range(len(dataset))}
        for dataset in (resolve("datasets", section.name)(section) for section in (run.data.train, run.data.eval))
    )
    assert len(held_out) > 400 and len(train) > 3000
    assert not train & held_out
    assert all(prompt.endswith("=") and " " not in prompt for prompt in held_out)


def test_the_warm_start_is_small() -> None:
    assert sum(path.stat().st_size for path in (EXAMPLES / "model").iterdir()) <= 3 * 2**20


def test_the_model_can_be_laid_out_by_other_engines() -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(EXAMPLES / "model")
    assert config.architectures == ["LlamaForCausalLM"] and config.num_hidden_layers == 4
    assert config.head_dim in (32, 64) and config.num_key_value_heads % 2 == 0 and config.vocab_size % 64 == 0
    assert AutoTokenizer.from_pretrained(EXAMPLES / "model")("42-25=")["input_ids"][0] == config.bos_token_id
