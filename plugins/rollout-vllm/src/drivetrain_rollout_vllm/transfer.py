"""The way of a stream of weights into vLLM: a weight-transfer engine of its API that is given tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

NAME = "drivetrain"


@dataclass
class Handover(WeightTransferInitInfo):
    """Nothing has to be agreed on: tensors are handed over within the process."""


@dataclass
class Weights(WeightTransferUpdateInfo):
    """Whole tensors under their Hugging Face names."""

    tensors: Sequence[tuple[str, Tensor]]


class StreamTransfer(WeightTransferEngine[Handover, Weights]):
    """Loads weights layer by layer: each is made anew of what has come, repacked as its kernels want it, and copied to
    where it was, so that captured graphs stay valid."""

    init_info_cls = Handover
    update_info_cls = Weights

    def init_transfer_engine(self, init_info: Handover) -> None:
        """There is nothing to set up."""

    def start_weight_update(self) -> None:
        self._waiting: dict[int, Any] = {}  # calls of loaders, which have tensors of their own
        initialize_layerwise_reload(self.model)
        self._layers = [get_layerwise_info(layer) for layer in self.model.modules()]

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Weights) -> None:
        self.model.load_weights((name, tensor.detach()) for name, tensor in update_info.tensors)
        self._keep()

    def _keep(self) -> None:
        """Give layers that wait for the rest of their weights copies of what they have: a bucket's tensors expire."""
        calls = [call for layer in self._layers for _, call in layer.loaded_weights]
        for call in calls:
            if id(call) not in self._waiting:
                given = call.arguments
                given |= {name: value.clone() for name, value in given.items()
                          if isinstance(value, Tensor) and not value.is_meta}  # fmt: skip
        self._waiting = {id(call): call for call in calls}

    def finish_weight_update(self) -> None:
        self._waiting, self._layers = {}, []
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_head(self.model)

    def shutdown(self) -> None:
        """There is nothing to let go of."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM up to 0.26 asks for it; weights come by :meth:`update_weights` alone."""
        raise NotImplementedError


def register() -> None:
    """Make the engine known to vLLM, once."""
    try:
        WeightTransferEngineFactory.register_engine(NAME, StreamTransfer)
    except ValueError:
        if WeightTransferEngineFactory._registry[NAME]() is not StreamTransfer:
            raise


@torch.no_grad()
def _repack_tied_head(model: nn.Module) -> None:
    """Pack a tied output head anew: vLLM's CPU build has a packed copy of it, which reloading leaves as it was."""
    head, inner = getattr(model, "lm_head", None), getattr(model, "model", None)
    embedding = getattr(inner, "embed_tokens", None)
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if tied and head is not None and embedding is not None and hasattr(head, "cpu_linear"):
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)
