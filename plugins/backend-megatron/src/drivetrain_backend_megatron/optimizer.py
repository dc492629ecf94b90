"""megatron-core's Adam for the section ``optimizer`` with ``name: adamw``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from drivetrain_backend_megatron import gradients

# one Adam everywhere, whether Apex or TransformerEngine is there or not
megatron_optimizer.USING_PYTORCH_OPTIMIZER = True


class Share(NamedTuple):
    """What a rank updates of a parameter of its model: the numbers from ``start`` of it as one row."""

    parameter: Tensor
    start: int


class Optimizer:
    """AdamW on float32 copies of this rank's parameters, or on a share of them for each data parallel rank.

    Weight decay applies to parameters of two and more dimensions; norms and biases, which have one, keep their size.

    Attributes:
        parts: megatron-core's optimizers, of dense parameters and of experts.
        distributed: whether data parallel ranks have shares of moments and float32 parameters.
        lr: the configured learning rate.
    """

    def __init__(
        self, pieces: Sequence[DistributedDataParallel], section: Any, *, distributed: bool, frees_gradients: bool
    ) -> None:
        """Make it.

        Args:
            pieces: of the model, with buffers for gradients.
            section: with ``lr``, ``betas``, ``eps`` and ``weight_decay``.
            distributed: see the attribute.
            frees_gradients: whether the buffers of gradients have no memory between updates.
        """
        example = next(pieces[0].parameters())
        dtype, fused = example.dtype, example.device.type == "cuda"
        settings = OptimizerConfig(
            optimizer="adam", lr=section.lr, weight_decay=section.weight_decay, adam_beta1=section.betas[0],
            adam_beta2=section.betas[1], adam_eps=section.eps, bf16=dtype == torch.bfloat16, params_dtype=dtype,
            use_distributed_optimizer=distributed, clip_grad=0.0,
        )  # fmt: skip
        self._pieces = pieces
        self.distributed = distributed
        self._gathers_late = False  # whether ranks have parameters that others updated since
        self.lr = section.lr
        self._all = get_megatron_optimizer(settings, list(pieces), use_gloo_process_groups=False)
        self.parts = list(getattr(self._all, "chained_optimizers", [self._all]))
        for group in self._groups():
            group["weight_decay"] = section.weight_decay * group["wd_mult"]
            if fused:
                group["fused"] = True  # else torch's step makes, for a time, a copy of all it updates
        self._buffers: list[tuple[torch.UntypedStorage, int]] = []
        if frees_gradients:
            self._buffers = [(storage, storage.nbytes()) for storage in gradients.storages(pieces)]
        self.end()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts if part.optimizer is not None for group in part.optimizer.param_groups]

    def gradient_norm(self) -> float:
        """The 2-norm of the gradients of all ranks as one vector; a collective call, once after gradients are summed.

        What several ranks have alike counts once.
        """
        self._all.prepare_grads()
        return float(self._all.get_grad_norm())

    def step(self, *, lr_factor: float, norm: float, max_norm: float | None) -> None:
        """Update the parameters: a collective call. Gradients of this norm are scaled down to ``max_norm``."""
        for group in self._groups():
            group["lr"] = self.lr * lr_factor
        for part in self.parts:
            if max_norm is not None and (parameters := part.get_parameters()):
                clip_grad_by_total_norm_fp32(parameters, max_norm, norm)
        self._all.step_with_ready_grads()
        self._gathers_late = self._pieces[0].ddp_config.overlap_param_gather

    def gather(self) -> None:
        """Have the parameters that other ranks updated, where no forward pass has asked for them: a collective call."""
        for piece in self._pieces if self._gathers_late else ():
            piece.start_param_sync(force_sync=True)
        self._gathers_late = False

    def begin(self) -> None:
        """Make all gradients zero; they have memory from here."""
        for storage, nbytes in self._buffers:
            storage.resize_(nbytes)
        for piece in self._pieces:
            piece.zero_grad_buffer()

    def end(self) -> None:
        """Let gradients go, and the memory of their buffers where that is to be free between updates."""
        self._all.zero_grad()
        for storage, _ in self._buffers:
            storage.resize_(0)

    def held(self) -> Iterator[tuple[Share, Tensor, dict[str, Any]]]:
        """What this rank updates of each parameter, the tensor that Adam changes for it, and the moments of that."""
        for part in self.parts:
            if part.optimizer is not None:
                yield from ((share, updated, part.optimizer.state[updated]) for share, updated in _shares(part))

    @property
    def steps(self) -> int:
        """Steps that the moments have seen; setting it comes after the moments."""
        for group in self._groups():
            if "step" in group:  # of kernels that are not PyTorch's
                return int(group["step"])
        return int(next((moments["step"] for _, _, moments in self.held() if "step" in moments), 0))

    @steps.setter
    def steps(self, steps: int) -> None:
        for part in self.parts:
            for group in part.optimizer.param_groups if part.optimizer is not None else ():
                if not isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                    group["step"] = steps
                    continue
                for updated in group["params"] if steps else ():
                    device = updated.device if group.get("fused") else None
                    part.optimizer.state[updated]["step"] = torch.tensor(float(steps), device=device)


def _shares(part: Any) -> Iterator[tuple[Share, Tensor]]:
    """What one of megatron-core's optimizers updates, with the tensor that it changes: a copy, or itself."""
    if isinstance(part, DistributedOptimizer):
        for whole, own in ((part.model_fp32_groups, part.shard_fp32_groups),
                           (part.model_float16_groups, part.shard_fp32_from_float16_groups)):  # fmt: skip
            for parameter, updated in zip(chain(*whole), chain(*own), strict=True):
                yield Share(parameter, part._get_model_param_range_map(parameter)["param"].start), updated
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for parameter, updated in zip(chain(*part.float16_groups), chain(*part.fp32_from_float16_groups), strict=True):
            yield Share(parameter, 0), updated
        yield from ((Share(parameter, 0), parameter) for parameter in chain(*part.fp32_from_fp32_groups))
    else:
        yield from ((Share(parameter, 0), parameter) for group in part.optimizer.param_groups
                    for parameter in group["params"])  # fmt: skip
