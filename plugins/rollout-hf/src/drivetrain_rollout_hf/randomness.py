"""Random numbers that depend on a sample's seed and on the index of the token, and on nothing else.

A counter-based generator has no state: the number for token ``t`` of a sample is a hash of ``(seed, t)``. Whatever
else is drawn beside it, and in whatever order, a sample meets the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The signed number with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


# Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), variant 13 of the mixer.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift of int64, whose own ``>>`` repeats the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """A bijection of 64 bits in which every input bit reaches every output bit; products wrap around."""
    bits = (bits ^ _shift_right(bits, 30)) * _FIRST
    bits = (bits ^ _shift_right(bits, 27)) * _SECOND
    return bits ^ _shift_right(bits, 31)


def stream_keys(seeds: Iterable[int], device: torch.device) -> Tensor:
    """The streams of some 64-bit seeds, int64 ``(rows,)``. Mixed once more, so that near seeds have far streams."""
    return _mix(torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device))


def uniforms(keys: Tensor, indices: Tensor) -> Tensor:
    """One number of ``[0, 1)`` for each row, float64 with all 53 bits.

    Args:
        keys: from :func:`stream_keys`, ``(rows,)``.
        indices: of the token to draw, int64 ``(rows,)``.
    """
    bits = _mix(keys + (indices + 1) * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53
