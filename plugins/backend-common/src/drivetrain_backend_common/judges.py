"""Linear layers in place of a language model's output layer: those of critics, and of classifiers that judge texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drivetrain import UserError


def check_critic(config: Any) -> None:
    """Make a Hugging Face config that of a critic, which has one label.

    Raises:
        drivetrain.UserError: the config is of a classifier that gives another number of labels.
    """
    if any(name.endswith("Classification") for name in config.architectures or ()) and config.num_labels != 1:
        raise UserError(f"the folder is of a classifier of {config.num_labels} labels; a critic has one",
                        where="critic.model.path", mend="give a causal language model, or a classifier of one label",
                        )  # fmt: skip
    config.num_labels = 1


def has_value_head(config: Any) -> bool:
    """Whether a folder must hold the value head: that of a token classifier, not of a language or a reward model."""
    return any(name.endswith("ForTokenClassification") for name in config.architectures or ())


def drawn_value_head(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """A value head, drawn, of these names and shapes: ``(1, hidden)``, and perhaps ``(1,)``.

    The weight is normal with standard deviation 1 / (hidden + 1), so that values start small; the bias is 0.
    """
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) / (shape[1] + 1) if len(shape) == 2 else torch.zeros(shape)
            for name, shape in shapes.items()}  # fmt: skip


def classifies(config: Any) -> bool:
    """Whether a Hugging Face config names a sequence classifier, or nothing."""
    if "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {}):
        return True
    names = config.architectures or ()
    return not names or any(name.endswith("ForSequenceClassification") for name in names)


def scores_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``(tokens, labels)`` in float32, from ``(tokens, hidden)`` and ``(labels, hidden)``."""
    scores = hidden.float() @ weight.float().t()
    return scores if bias is None else scores + bias.float()
