"""A critic: the trunk of a causal language model with a linear layer from hidden states to values.

It is one of transformers' token-classification models with one label, so what is exported is an ordinary folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification
from transformers.utils import logging

from drivetrain_backend_common.judges import check_critic, drawn_value_head, scores_of


def value_head(model: nn.Module) -> nn.Linear | None:
    """The layer from hidden states to values; None for a model that is no critic."""
    for name in ("score", "classifier"):
        if isinstance(head := getattr(model, name, None), nn.Linear) and head.out_features == 1:
            return head
    return None


def model_class(config: PreTrainedConfig) -> Any:
    """What builds a critic of a config: the family's token-classification class.

    For a family without one, the class is made of the family's causal language model as transformers makes its own.

    Raises:
        drivetrain.UserError: when the config is of a classifier that gives another number of labels.
    """
    check_critic(config)
    if type(config) in AutoModelForTokenClassification._model_mapping:
        return AutoModelForTokenClassification
    causal: Any = AutoModelForCausalLM._model_mapping[type(config)]
    base = next(kind for kind in causal.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    name = causal.__name__.replace("ForCausalLM", "ForTokenClassification")
    made: Any = type(name, (GenericForTokenClassification, base), {})

    def from_config(config: PreTrainedConfig, *, trust_remote_code: bool = False, **options: Any) -> Any:
        return made._from_config(config, **options)

    made.from_config = from_config  # as the automatic classes call it
    return made


@contextmanager
def head_may_be_missing() -> Iterator[None]:
    """Keep transformers from reporting that a folder lacks the value head; :func:`drawn_head` is put there."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def drawn_head(model: PreTrainedModel, missing: set[str], seed: int) -> dict[str, Tensor]:
    """Those tensors of the value head that a folder lacks, drawn, by their names."""
    head = cast(nn.Linear, value_head(model))
    name = next(name for name, module in model.named_modules() if module is head)
    shapes = {f"{name}.{key}": tuple(tensor.shape) for key, tensor in head.named_parameters()}
    drawn = drawn_value_head(shapes, seed)
    return {name: tensor for name, tensor in drawn.items() if name in missing}


@torch.no_grad()
def draw_head(model: PreTrainedModel, missing: set[str], seed: int) -> set[str]:
    """Put :func:`drawn_head` into the model; returns what else is missing."""
    drawn = drawn_head(model, missing, seed)
    for name, tensor in drawn.items():
        model.get_parameter(name).copy_(tensor)
    return missing - drawn.keys()


def values_of(hidden: Tensor, head: nn.Linear) -> Tensor:
    """``(tokens,)`` in float32, from ``(tokens, hidden)``."""
    return scores_of(hidden, head.weight, head.bias)[:, 0]
