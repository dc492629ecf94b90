"""The kernels that attention over packed sequences can use, by the names that the option ``attention`` has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from drivetrain_backend_fsdp.flash import FlashAttention2, Varlen
from drivetrain_backend_fsdp.flex import Flex
from drivetrain_backend_fsdp.sdpa import Sdpa

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from drivetrain_backend_fsdp.attention import Reach


class Kernel(Protocol):
    """Causal attention within each sequence of one packed row.

    Attributes:
        half: whether it computes in half precision alone.
    """

    half: bool

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """``lengths`` of the row's sequences, longest first."""

    @staticmethod
    def check(device: torch.device, dtype: torch.dtype, *, learns: bool) -> None:
        """Raise UserError where the kernel does not run on the device, or in the type that is computed in; backward
        too, of a model that learns."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, reach: Reach | None, *, scaling: float | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """``(1, heads, tokens, dim)`` to ``(tokens, heads, dim)``; ``key`` and ``value`` may have fewer heads.

        Raises:
            drivetrain.UserError: for what the kernel does not compute.
        """


KERNELS: dict[str, type[Kernel]] = {
    "sdpa": Sdpa,
    "flex": Flex,
    "varlen": Varlen,
    "flash_attention_2": FlashAttention2,
}
