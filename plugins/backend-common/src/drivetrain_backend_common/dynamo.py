"""Settings of torch's compiler."""

from __future__ import annotations

import torch._dynamo

GRAPHS = 64


def allow_graphs() -> None:
    """Let a function have so many graphs; past the limit PyTorch would run it operation by operation.

    One function of transformers wraps many others, and all graphs of these count as graphs of that one. A kernel of
    attention has graphs by dtype, shape of heads, window and soft cap, with gradient and without.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
