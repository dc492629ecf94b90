"""The kernels that attention over packed sequences can use, by the names that the option ``attention`` has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from drivetrain_backend_common.flash import FlashAttention2, Varlen
from drivetrain_backend_common.flex import Flex
from drivetrain_backend_common.sdpa import Sdpa

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Reach:
    """How far back a token looks: at ``size`` tokens, itself among them, or at those of its chunk of ``size``."""

    size: int
    chunked: bool = False

    def first(self, position: Tensor) -> Tensor:
        """The first position of its sequence that each one looks at; it may lie before the sequence."""
        return position - position % self.size if self.chunked else position - self.size + 1


class Kernel(Protocol):
    """Causal attention within each sequence of one packed row.

    Attributes:
        half: whether it computes in half precision alone.
    """

    half: bool

    def __init__(self, lengths: Sequence[int], device: torch.device, keys: Sequence[int] | None = None) -> None:
        """A row.

        Args:
            lengths: of its sequences; with the longest first there is least to do.
            keys: how many keys each has, where queries are the last tokens of them alone. Omitted: as many as queries.

        Raises:
            drivetrain.UserError: the kernel needs the queries of all.
        """

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
