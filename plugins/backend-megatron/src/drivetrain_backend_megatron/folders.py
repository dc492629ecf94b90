"""Hugging Face folders: what a model is read from, and what it is exported to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from drivetrain import UserError
from drivetrain.weights import WeightEntry
from drivetrain_backend_common import judges, tensor_files
from drivetrain_backend_common.folders import complete

if TYPE_CHECKING:
    from drivetrain import BackendContext


def read_config(context: BackendContext) -> PreTrainedConfig:
    """The config of the model that ``context.model`` describes.

    Raises:
        drivetrain.UserError: when there is none, the hardware does not compute in the dtype, or the role is one of a
            model with a head that this one has not.
    """
    model, where = context.model, section(context)
    if model.dtype not in context.hardware.dtypes():
        raise UserError(f"{context.hardware.device_type} does not train in {model.dtype}", where=f"{where}.dtype",
                        mend=f"choose from {', '.join(context.hardware.dtypes())}")  # fmt: skip
    if not (model.path / "config.json").is_file():
        what = "has no config.json" if model.path.is_dir() else "is no folder"
        raise UserError(f"{model.path} {what}", where=f"{where}.path", mend="give the folder of a Hugging Face model")
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    assert isinstance(config, PreTrainedConfig)
    if context.role == "critic":
        judges.check_critic(config)
    elif context.role == "reward" and not judges.classifies(config):
        raise UserError(f"{model.path} holds {(config.architectures or [''])[0]}, which has no classification head",
                        where=f"{where}.path", mend="give the folder of a sequence classifier"
                        " (AutoModelForSequenceClassification)")  # fmt: skip
    return config


def section(context: BackendContext) -> str:
    """The key of the section that describes the model, for messages."""
    return "reward_model.model" if context.role == "reward" else "model"


def labels(config: PreTrainedConfig, role: str) -> dict[str, Any]:
    """What tells :class:`families.Shape` of the head that a model has for its role."""
    if role == "critic":
        return {"labels": 1, "label_bias": getattr(config, "token_classification_bias", True)}
    return {"labels": config.num_labels} if role == "reward" else {}


def value_head(context: BackendContext, config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Those tensors of the model's head, of these names and shapes, that its folder may lack, drawn."""
    draws = context.role == "critic" and (context.model.init == "random" or not judges.has_value_head(config))
    return judges.drawn_value_head(shapes, context.seed) if draws else {}


@contextmanager
def weights_of(context: BackendContext, config: PreTrainedConfig, drawn: Mapping[str, Tensor]) -> Iterator[Path]:
    """A folder with the model's weights: the one given, or one with weights that transformers draws from the run's
    seed, which takes the whole model's size in this process's host memory and on its disk. What is ``drawn`` already
    is not drawn again. A classifier of texts is always read."""
    if context.model.init != "random" or context.role == "reward":
        yield context.model.path
        return
    with tempfile.TemporaryDirectory() as folder:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed)
            kind = AutoModelForTokenClassification if context.role == "critic" else AutoModelForCausalLM
            model = kind.from_config(config, dtype=getattr(torch, context.model.dtype))
        for name, tensor in drawn.items():
            model.get_parameter(name).data.copy_(tensor)
        model.save_pretrained(folder)
        del model
        yield Path(folder)


def export(entries: Iterable[WeightEntry], config: PreTrainedConfig, context: BackendContext, folder: Path) -> None:
    """Write a Hugging Face folder, which appears whole or not at all: a collective call; rank 0 writes."""
    with tensor_files.drained(entries) as going:
        if context.rank == 0:
            with complete(folder) as aside:
                tensor_files.write_model(going, aside)
                _write_about(config, context, aside)


def _write_about(config: PreTrainedConfig, context: BackendContext, folder: Path) -> None:
    """Write all of a Hugging Face folder but the weights."""
    model = context.model
    config.dtype = getattr(torch, model.dtype)
    if context.role == "critic":
        config.architectures = [MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    if context.role in ("actor", "ref"):
        given = (model.path / "generation_config.json").is_file()
        generation = (GenerationConfig.from_pretrained(model.path) if given
                      else GenerationConfig.from_model_config(config))  # fmt: skip
        generation.save_pretrained(folder)
    try:
        AutoTokenizer.from_pretrained(model.tokenizer_path, trust_remote_code=model.trust_remote_code).save_pretrained(
            folder
        )
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer does not load: {error}", where="model.tokenizer",
                        mend="give the folder of a tokenizer") from error  # fmt: skip
