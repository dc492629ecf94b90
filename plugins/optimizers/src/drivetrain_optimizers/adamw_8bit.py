"""The optimizer ``adamw_8bit``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo import mark_static
from torch.distributed.tensor import DTensor
from torchao.optim.quant_utils import create_dynamic_map, dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

from drivetrain import UserError
from drivetrain_optimizers.configs import AdamW8bitConfig

SMALLEST = 4096  # weights of a matrix that is worth quantising, as in the paper


def adamw_8bit(parameters: Iterable[tuple[str, nn.Parameter]], config: AdamW8bitConfig) -> AdamW8bit:
    """AdamW with quantised moments over named parameters.

    Weight decay applies to parameters of two and more dimensions, as in ``adamw``.

    Raises:
        drivetrain.UserError: when no parameter can be quantised.
    """
    trainable = [parameter for _, parameter in parameters if parameter.requires_grad]
    if not any(_quantised(parameter, config.block_size) for parameter in trainable):
        raise UserError(
            f"no matrix has rows of a multiple of {config.block_size} and {SMALLEST} weights, so adamw_8bit saves"
            " nothing", where="optimizer.block_size", mend="set a smaller block, or optimizer.name=adamw",
        )  # fmt: skip
    return AdamW8bit(trainable, config)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) whose moments are kept in 8 bits (Dettmers et al. 2022,
    arXiv:2110.02861): the largest magnitude of a block in float32, and for each weight the place, in a table of 256
    numbers between -1 and 1 (0 and 1 for the mean square), of what its moment is times that.

    Moments of vectors, of matrices of few weights and of matrices whose rows are no multiple of a block are float32.
    A step computes in float32, whatever the dtype of the weights.

    A block never crosses rows, and which parameters are quantised depends on their whole shape alone. So moments of a
    parameter that is sharded by rows are the same on any number of ranks, and each of them is a tensor with as many
    rows as the parameter: ``exp_avg``, ``exp_avg_sq`` of its shape, uint8 or float32, and for uint8 ``exp_avg_scale``,
    ``exp_avg_sq_scale`` ``(rows, blocks of a row)``.
    """

    def __init__(self, parameters: list[nn.Parameter], config: AdamW8bitConfig) -> None:
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        super().__init__([group for group in groups if group["params"]], {"lr": config.lr})
        self.config = config

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` is not called."""
        config = self.config
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self._start(parameter, state)
                state["step"] += 1
                weight = _local(parameter)
                if not weight.numel():
                    continue
                step, (beta1, beta2) = float(state["step"]), config.betas
                factors = [group["lr"] * group["weight_decay"], group["lr"] / (1 - beta1**step), (1 - beta2**step)]
                numbers: tuple[Any, ...] = (*(torch.tensor(factor) for factor in factors), beta1, beta2, config.eps)
                mean, square = _local(state["exp_avg"]), _local(state["exp_avg_sq"])
                if "exp_avg_scale" not in state:
                    _update(weight, _local(parameter.grad), mean, square, *numbers)
                    continue
                scales = (_local(state[f"{name}_scale"]) for name in ("exp_avg", "exp_avg_sq"))
                tensors = (weight, _local(parameter.grad).contiguous(), mean, square, *scales)
                flat = (tensor.view(-1).detach() for tensor in tensors)  # detached: views of one shape to the compiler
                compiled = weight.device.type != "cpu" if config.compile is None else config.compile
                update = _compiled(config.block_size) if compiled else partial(_update_8bit, config.block_size)
                update(*flat, _table(weight.device, True), _table(weight.device, False), *numbers)

    def _start(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        quantised = _quantised(parameter, self.config.block_size)
        state["step"] = torch.tensor(0.0)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8 if quantised else torch.float32)
            if quantised:
                state[f"{name}_scale"] = _scales(parameter, self.config.block_size)


def _quantised(parameter: Tensor, block_size: int) -> bool:
    return parameter.dim() >= 2 and parameter.numel() >= SMALLEST and _row(parameter) % block_size == 0


def _row(parameter: Tensor) -> int:
    """Weights of a row, for an index of the first dimension."""
    return parameter.numel() // parameter.shape[0]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _scales(parameter: Tensor, block_size: int) -> Tensor:
    """Zeros ``(rows, blocks of a row)`` in float32, sharded as the parameter is."""
    local, blocks = _local(parameter), _row(parameter) // block_size
    scales = local.new_zeros(len(local), blocks, dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return scales
    return DTensor.from_local(
        scales, parameter.device_mesh, parameter.placements, run_check=False,
        shape=torch.Size((len(parameter), blocks)), stride=(blocks, 1),
    ).to(parameter.device)  # fmt: skip


@cache
def _table(device: torch.device, signed: bool) -> Tensor:
    """The 256 numbers that a moment, divided by the scale of its block, is rounded to."""
    table = torch.tensor(create_dynamic_map(signed=signed), device=device)
    mark_static(table)  # or else a matrix of 256 blocks would be another case to torch.compile
    return table


@cache
def _compiled(block_size: int) -> Callable[..., None]:
    """One kernel for matrices of all sizes."""
    return cast("Callable[..., None]", torch.compile(partial(_update_8bit, block_size), fullgraph=True, dynamic=True))


def _update_8bit(
    block_size: int, weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, mean_scale: Tensor,
    square_scale: Tensor, signed: Tensor, unsigned: Tensor, *numbers: Any,
) -> None:  # fmt: skip
    """:func:`_update` with quantised moments; all tensors flat."""
    means = dequant_with_qmap(mean, signed, mean_scale)
    squares = dequant_with_qmap(square, unsigned, square_scale)
    _update(weight, gradient, means, squares, *numbers)
    for moment, table, codes, scale in (
        (means, signed, mean, mean_scale), (squares, unsigned, square, square_scale),
    ):  # fmt: skip
        scaled, largest = scale_tensor(moment, block_size)
        codes.copy_(quantize_8bit_with_qmap(scaled, table))
        scale.copy_(largest)


def _update(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, decay: Tensor, rate: Tensor, correction: Tensor,
    beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """One step of AdamW, in place.

    Args:
        decay: learning rate times weight decay.
        rate: learning rate over ``1 - beta1^t``.
        correction: ``1 - beta2^t``.
    """
    gradient = gradient.float()
    mean.lerp_(gradient, 1 - beta1)
    square.lerp_(gradient.square(), 1 - beta2)
    denominator = (square / correction).sqrt() + eps
    moved = weight.float() * (1 - decay) - rate * mean / denominator
    weight.copy_(moved)
