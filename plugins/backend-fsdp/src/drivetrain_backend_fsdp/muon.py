"""The optimizer ``muon``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from drivetrain import UserError
from drivetrain_backend_fsdp.optimizer import adamw

if TYPE_CHECKING:
    from drivetrain_backend_fsdp.config import MuonConfig


def muon(parameters: Iterable[tuple[str, nn.Parameter]], config: MuonConfig) -> Muon:
    """Muon for hidden matrices, AdamW for the rest, over named parameters.

    Hidden matrices are those without a part of ``config.adamw_names`` in their name. A parameter of three dimensions,
    as that of the experts of a mixture, is a matrix for each index of the first.

    Raises:
        drivetrain.UserError: when there is no hidden matrix.
    """
    matrices: list[nn.Parameter] = []
    rest: list[tuple[str, nn.Parameter]] = []
    for name, parameter in parameters:
        if parameter.requires_grad and parameter.dim() in (2, 3) and not any(x in name for x in config.adamw_names):
            matrices.append(parameter)
        elif parameter.requires_grad:
            rest.append((name, parameter))
    if not matrices:
        raise UserError("the model has no hidden matrix that muon could train", where="optimizer.adamw_names",
                        mend="exclude fewer names, or set optimizer.name=adamw")  # fmt: skip
    others = adamw(rest, config.model_copy(update={"lr": config.adamw_lr or config.lr})) if rest else None
    return Muon(matrices, others, config)


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalised running mean of a matrix's gradient, whose singular values are all about 1.

    With gradient G, momentum mu and learning rate lr, for a matrix W of ``(rows, columns)``::

        M <- mu M + (1 - mu) G
        U = mu M + (1 - mu) G  with nesterov, else M
        W <- (1 - lr weight_decay) W - lr adjust orthogonal(U)

    ``adjust`` is ``0.2 sqrt(max(rows, columns))`` (match_rms_adamw) or ``sqrt(max(1, rows / columns))`` (original).
    Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
    Scalable for LLM Training", arXiv:2502.16982, for weight decay and match_rms_adamw.

    A sharded matrix is gathered whole, in bfloat16, one matrix at a time; a step is then a collective call.

    Args:
        matrices: of two dimensions, or of three with a matrix for each index of the first.
        others: the optimizer of all other parameters; it becomes part of this one.
    """

    def __init__(self, matrices: list[nn.Parameter], others: torch.optim.Optimizer | None, config: MuonConfig) -> None:
        super().__init__(matrices, {"lr": config.lr, "weight_decay": config.weight_decay})
        self.config = config
        self.others = others
        if others is not None:
            others.state = self.state
            self.param_groups += others.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` is not called."""
        group, config = self.param_groups[0], self.config
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - config.momentum)
            update = state["momentum"]
            if config.nesterov:
                update = parameter.grad.lerp(update, config.momentum)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            scale = _scale(parameter, config.adjust_lr)
            parameter.add_(_orthogonal(update, config.ns_steps), alpha=-group["lr"] * scale)
        if self.others is not None:
            self.others.step()


def _scale(parameter: Tensor, adjust_lr: str) -> float:
    rows, columns = parameter.shape[-2:]
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _orthogonal(update: Tensor, steps: int) -> Tensor:
    """:func:`newton_schulz` of each matrix in bfloat16, distributed as the argument is."""
    update = update.bfloat16()
    if not isinstance(update, DTensor):
        return newton_schulz(update, steps)
    options: Any = {"run_check": False, "shape": update.shape, "stride": update.stride()}
    mesh, placements = update.device_mesh, update.placements
    if any(place.is_shard() and cast(Any, place).dim >= update.dim() - 2 for place in placements):
        result = newton_schulz(update.full_tensor(), steps)
        everywhere = DTensor.from_local(result, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return everywhere.redistribute(placements=placements)
    return DTensor.from_local(newton_schulz(update.to_local(), steps), mesh, placements, **options)


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Roughly ``U V^T`` of ``matrices = U S V^T``, ``(..., rows, columns)``: each singular value becomes one
    between 0.5 and 1.5.

    ``X <- a X + (b X X^T + c (X X^T)^2) X``, from ``X`` divided by its Frobenius norm. The coefficients have a steep
    slope at 0, so that small singular values grow fast.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
