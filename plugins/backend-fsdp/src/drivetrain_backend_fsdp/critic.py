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

from drivetrain import UserError


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
    if any(name.endswith("Classification") for name in config.architectures or ()) and config.num_labels != 1:
        raise UserError(f"the folder is of a classifier of {config.num_labels} labels; a critic has one",
                        where="critic.model.path", mend="give a causal language model, or a classifier of one label",
                        )  # fmt: skip
    config.num_labels = 1
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


def has_head(config: PreTrainedConfig) -> bool:
    """Whether a folder must hold the value head: that of a token classifier, not of a language or a reward model."""
    return any(name.endswith("ForTokenClassification") for name in config.architectures or ())


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
    """Those tensors of the value head that a folder lacks, drawn, by their names.

    The weight is normal with standard deviation 1 / (hidden + 1), so that values start small; the bias is 0.
    """
    head = cast(nn.Linear, value_head(model))
    name = next(name for name, module in model.named_modules() if module is head)
    weight = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
    drawn = {f"{name}.weight": weight / (head.in_features + 1)}
    if head.bias is not None:
        drawn[f"{name}.bias"] = torch.zeros(head.bias.shape)
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
    values = hidden.float() @ head.weight.float()[0]
    return values if head.bias is None else values + head.bias.float()
