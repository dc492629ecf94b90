"""Engines for tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_hf import save_tokenizer
from transformers import PreTrainedModel

from drivetrain import ModelConfig, PluginConfig, RolloutContext
from drivetrain.builtin.cpu import CPU
from drivetrain_rollout_hf.config import HFRolloutConfig
from drivetrain_rollout_hf.engine import HFRollout


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[..., HFRollout]:
    """Build an engine for a model, which is attached unless ``own``."""

    def build(
        model: PreTrainedModel, *, own: bool = False, tokenizer: bool = False, max_batch_sequences: int = 256,
        **model_options: Any,
    ) -> HFRollout:  # fmt: skip
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        if own:
            model.save_pretrained(folder)
        else:
            model.config.save_pretrained(folder)
        if tokenizer:
            save_tokenizer(folder)
        context = RolloutContext(
            model=ModelConfig(path=folder, **model_options), hardware=CPU(PluginConfig(name="cpu")), rank=0,
            world_size=1, seed=1,
        )  # fmt: skip
        config = HFRolloutConfig(name="hf", max_response_tokens=8, max_batch_sequences=max_batch_sequences)
        engine = HFRollout(config, context)
        engine.initialize()
        if not own:
            engine.attach(model)
        return engine

    return build
