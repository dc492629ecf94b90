"""What is computed again in the backward pass gives the same gradients, and really is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_learning as learning
import megatron_rig as rig
import pytest
import torch
from megatron.core.transformer.mlp import MLP

from drivetrain_backend_megatron import build
from drivetrain_backend_megatron.attention import CoreAttention
from drivetrain_backend_megatron.moe import Router

pytestmark = pytest.mark.usefixtures("groups_go")

FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
LAYERS = 2


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.write_model(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=LAYERS)


BOTH = [  # what is computed again once more a pass, by options
    (FULL, {"attention": LAYERS, "norm": 2 * LAYERS, "router": LAYERS, "mlp": LAYERS}),
    ({**FULL, "recompute_num_layers": 2}, {"attention": LAYERS, "norm": 2 * LAYERS, "router": LAYERS, "mlp": LAYERS}),
    (SELECTIVE, {"attention": LAYERS}),
]
DENSE = [
    ({**FULL, "recompute_method": "block"}, {"attention": 1, "norm": 2, "mlp": 1}),
    ({**SELECTIVE, "recompute_modules": ("core_attn", "mlp")}, {"attention": LAYERS, "mlp": LAYERS}),
]
EXPERTS = [({**SELECTIVE, "recompute_modules": ("core_attn", "moe")}, {"attention": LAYERS, "router": LAYERS})]


@pytest.mark.parametrize(
    "folder, options, layers",
    [("qwen3", *case) for case in BOTH + DENSE] + [("mixtral", *case) for case in BOTH + EXPERTS],
    indirect=["folder"],
)
def test_gradients_are_the_same(
    folder: Path, options: dict[str, Any], layers: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = "mixtral" in folder.name
    calls = {"attention": 0, "norm": 0, "router": 0, "mlp": 0}

    def counted(kind: type, name: str) -> None:
        forward = kind.forward  # type: ignore[attr-defined]

        def wrapped(self: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += name != "norm" or hidden.shape[-1] == 32  # those of heads are narrower
            return forward(self, hidden, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", wrapped)

    counted(CoreAttention, "attention")
    counted(build.RMSNorm, "norm")
    counted(Router, "router")
    counted(MLP, "mlp")
    seen, counts = [], []
    for chosen in ({}, options):
        made = learning.backend(folder, **chosen)
        calls.update(dict.fromkeys(calls, 0))
        steps = [learning.update(made, step) for step in range(learning.STEPS)]
        counts.append(dict(calls))
        seen.append((steps, learning.whole_weights(made)))
        made.close()
    (steps, weights), (again, same) = seen
    assert all(pytest.approx(before, rel=1e-6) == after for before, after in zip(steps, again, strict=True))
    assert all(torch.allclose(weights[name], same[name], atol=1e-7) for name in weights)
    passes = counts[0]["attention"] // LAYERS
    assert passes > 3 * learning.STEPS
    for name in ("attention", "norm", "router" if mixture else "mlp"):
        assert counts[1][name] - counts[0][name] == passes * layers.get(name, 0), name
