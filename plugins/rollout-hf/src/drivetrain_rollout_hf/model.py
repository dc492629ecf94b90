"""The module that generates: the engine's own, read from the model's folder, or one that is attached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from drivetrain import RolloutContext, UserError

_ATTENTION = frozenset({"full_attention", "sliding_attention", "attention"})


def load_own(context: RolloutContext) -> nn.Module:
    """Read or draw the weights of the context's model onto this process's device, in evaluation mode.

    Raises:
        UserError: the folder holds no causal language model, or not all of its weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model = context.model
    dtype = getattr(torch, model.dtype)
    if model.init == "random":
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed)
            module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)
    else:
        options = {"dtype": dtype, "trust_remote_code": model.trust_remote_code, "output_loading_info": True}
        try:
            module, report = cast(Any, AutoModelForCausalLM.from_pretrained(model.path, **options))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise UserError(f"{model.path} does not load as a causal language model: {error}", where="model.path",
                            mend="give the folder of a Hugging Face model with its weights") from error  # fmt: skip
        if missing := sorted(report["missing_keys"]):
            raise UserError(f"{model.path} lacks {len(missing)} weights, first {missing[0]!r}", where="model.path",
                            mend="give the folder of a whole causal language model")  # fmt: skip
    own: nn.Module = module.to(context.hardware.device())
    return own.requires_grad_(False).eval()


def text_config(module: Any) -> Any:
    """The transformers config of the module's language model."""
    return module.config.get_text_config()


def check_supported(module: nn.Module) -> None:
    """Refuse models whose memory of the past is something else than keys and values, and attention without masks.

    Raises:
        UserError: naming what the model has.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    config = text_config(module)
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION)
    if getattr(module, "_is_stateful", False) and not strange:
        strange = ["a recurrent state"]
    if config.is_encoder_decoder:
        strange.append("an encoder")
    if getattr(config, "num_kv_shared_layers", 0):
        strange.append("layers that share keys and values")
    if strange:
        raise UserError(
            f"rollout 'hf' decodes attention layers only; model type {config.model_type!r} has {', '.join(strange)}",
            where="rollout.name", mend="generate with another engine, such as vllm",
        )  # fmt: skip
    attention = config._attn_implementation
    if attention not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise UserError(
            f"attention {attention!r} has no mask function, so that it would attend to padding", where="rollout",
            mend="register one with transformers' AttentionMaskInterface",
        )  # fmt: skip


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and every part of it back into the mode it was in."""
    training = [part for part in module.modules() if part.training]
    if training:
        module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
