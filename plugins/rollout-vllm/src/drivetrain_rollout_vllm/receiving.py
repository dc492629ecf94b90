"""What a stream of weights has to hold for a model, whatever the engine makes of it."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from drivetrain import ModelConfig, WeightStreamError
from drivetrain.weights import Bucket, Manifest, WeightEntry


def manifest_of(model: ModelConfig) -> Manifest:
    """Names, shapes and dtypes of the weights in the model's files, told by its config alone."""
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    files = revert_weight_conversion(cast(PreTrainedModel, module), module.state_dict())
    return Manifest({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in files.items()})


def accepted(bucket: Bucket, manifest: Manifest) -> list[WeightEntry]:
    """The entries of a bucket that carry a tensor, each counted in.

    Raises:
        WeightStreamError: for an adapter, a shard, or what the manifest does not accept.
    """
    if bucket.kind != "full":
        raise WeightStreamError(f"rollout 'vllm' takes full weights; a bucket of kind {bucket.kind!r} was sent")
    for entry in bucket.entries:
        if entry.placement.count > 1:
            raise WeightStreamError(f"weight {entry.name!r} was sent as a shard; rollout 'vllm' takes whole tensors")
        manifest.accept(entry)
    return [entry for entry in bucket.entries if entry.alias is None]
