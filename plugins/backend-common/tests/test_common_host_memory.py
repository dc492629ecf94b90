"""Host memory in buckets."""

from __future__ import annotations

import pytest

from drivetrain import UserError
from drivetrain_backend_common import host_memory


def test_buckets_are_powers_of_two_and_waste_little() -> None:
    for nbytes in (1, 2**20, 2**20 + 1, 3 * 2**20, host_memory.BUCKET_BYTES - 1, 5 * host_memory.BUCKET_BYTES + 12345):
        sizes = host_memory.bucket_sizes(nbytes)
        assert nbytes <= sum(sizes) < nbytes + host_memory.SMALLEST_BYTES
        assert all(size & (size - 1) == 0 and size <= host_memory.BUCKET_BYTES for size in sizes)
    assert host_memory.bucket_sizes(0) == []


def test_host_memory_that_is_not_there_is_an_error() -> None:
    pool = host_memory.HostPool(pinned=False)
    with pytest.raises(UserError, match="of host memory are not to be had"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_memory, "BUCKET_BYTES", 2**62)
            pool.reserve(2**62)
    assert pool.nbytes == 0
