"""What the backward pass computes again, and layers that are compiled."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import fsdp_rig as rig
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import UserError
from drivetrain_backend_fsdp import compiling
from drivetrain_backend_fsdp.config import FSDPConfig


class Watched(TorchDispatchMode):
    """Counts operations, and the bytes of their results, but for views of weights, that are alive when a backward pass
    begins."""

    def __init__(self, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.calls: Counter[str] = Counter()
        self.results: dict[StorageWeakRef, int] = {}
        self.kept = 0
        backward = torch.Tensor.backward

        def watched(tensor: torch.Tensor) -> None:
            self.kept = max(self.kept, sum(size for made, size in self.results.items() if not made.expired()))
            backward(tensor)

        monkeypatch.setattr(torch.Tensor, "backward", watched)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls[func.name().split(".")[0].removeprefix("aten::")] += 1
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.weights:
                    self.results[StorageWeakRef(storage)] = storage.nbytes()
        return result


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_moe"])
def test_selective_recomputes_no_products(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data, seen = rig.write_model(family, tmp_path), rig.batch(), {}
    for chosen in (False, "selective", "full"):
        made = rig.backend(folder, max_grad_norm=None, gradient_checkpointing=chosen)
        with monkeypatch.context() as patch, Watched(made.model, patch) as watched:
            loss, gradients = rig.gradients(made, data)
        seen[chosen] = (loss, gradients, watched)
    plain, selective, full = (watched.calls for _, _, watched in seen.values())
    products = ("mm", "addmm", "_grouped_mm")
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert sum(plain[name] for name in products) > 20
    for name in products:
        assert selective[name] == plain[name], name
    assert sum(full[name] for name in products) > sum(plain[name] for name in products)
    if family != "gemma2":  # soft-capped scores have no fused kernel
        assert 0 < plain[attention] == selective[attention] == full[attention] / 2
    assert plain["rsqrt"] < selective["rsqrt"] <= full["rsqrt"]
    kept = [watched.kept for _, _, watched in seen.values()]
    assert kept[0] > 1.4 * kept[1] and kept[1] > 1.4 * kept[2]
    for loss, gradients, _ in seen.values():
        assert loss == seen[False][0]
        rig.assert_close(gradients, seen[False][1], 0)


def test_true_is_full() -> None:
    assert FSDPConfig(gradient_checkpointing=True).gradient_checkpointing == "full"
    assert FSDPConfig(gradient_checkpointing="selective").gradient_checkpointing == "selective"
    assert FSDPConfig(gradient_checkpointing=False).gradient_checkpointing is False
    for options, what in (
        ({"compile": True}, "no operation of compiled layers"),
        ({"attention": "flex"}, "attention of flex"),
        ({"activation_offload": True}, "does not reach"),
        ({"gradient_checkpointing": False, "compile": True, "activation_offload": True}, "what compiled layers save"),
    ):
        with pytest.raises(ValueError, match=what):
            FSDPConfig(**{"gradient_checkpointing": "selective"} | options)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that torch.compile captures, which run operation by operation: compiling them takes a minute."""
    captured: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        captured.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    return captured


def test_compiled_layers_equal_plain_ones(tmp_path: Path, graphs: list[Any]) -> None:
    folder, data = rig.write_model("qwen2", tmp_path, num_hidden_layers=1), rig.batch()
    options: dict[str, Any] = {"max_grad_norm": None, "lora": {"targets": ("q_proj",)}}
    plain = rig.adapted(folder, **options)
    loss, want = rig.gradients(plain, data)
    numbers = []
    for budget, chosen in ((1000, False), (40, "full"), (57, False)):
        made = rig.adapted(folder, **options, micro_batch_tokens=budget, compile=True, gradient_checkpointing=chosen)
        got_loss, got = rig.gradients(made, data)
        assert got_loss == pytest.approx(loss, rel=1e-5)
        rig.assert_close(got, want, 2e-6)
        numbers.append(len(graphs))
    assert 0 < numbers[0] and numbers[1] == numbers[2]  # rows of further lengths share graphs
    off, expected = (backend.reference_forward(data, ["log_probs"], temperature=1.0)["log_probs"]
                     for backend in (made, plain))  # fmt: skip
    torch.testing.assert_close(off, expected, atol=1e-5, rtol=0)
    numbers = [len(graphs)]
    made.live_module().generate(input_ids=data.batch["input_ids"][:2, :3], max_new_tokens=2)
    assert [len(graphs)] == numbers  # generation is not compiled


def test_without_a_compiler_it_is_refused(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        rig.backend(qwen2, compile=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="compiling for cuda needs triton"):
        compiling.compile_layers([], torch.device("cuda"))
