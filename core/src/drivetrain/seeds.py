"""Seeds that derive from the run's seed by name, so that nothing depends on the order of draws."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from names and numbers, the same on every machine; it fits torch's generators."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
