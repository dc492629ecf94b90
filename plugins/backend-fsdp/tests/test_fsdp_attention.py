"""Kernels of attention over packed sequences: each computes what a sequence by itself gives."""

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fsdp_rig as rig
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention import varlen as torch_varlen
from transformers import Llama4TextConfig, MistralConfig
from transformers.masking_utils import create_chunked_causal_mask, create_sliding_window_causal_mask

from drivetrain import UserError
from drivetrain_backend_common import flex
from drivetrain_backend_common.attention_kernels import KERNELS, Reach
from drivetrain_backend_common.flash import FlashAttention2, Varlen
from drivetrain_backend_common.flex import Flex
from drivetrain_backend_common.sdpa import Sdpa
from drivetrain_backend_fsdp import attention
from drivetrain_backend_fsdp.attention import Packing
from drivetrain_backend_fsdp.config import FSDPConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mixtral"])
def test_flex_equals_plain_pytorch(family: str, tmp_path: Path) -> None:
    folder, data = rig.write_model(family, tmp_path), rig.batch()
    made = rig.backend(folder, learns=False, micro_batch_tokens=40, attention="flex")
    got = made.forward(data, ["log_probs"], temperature=0.7)["log_probs"]
    with torch.no_grad():
        want, _ = rig.plain_outputs(rig.plain(folder), data, 0.7)
    real = data.batch["attention_mask"][:, rig.PROMPT :] == 1
    torch.testing.assert_close(got[real], want[real].float(), atol=2e-5, rtol=1e-5)


def test_gradients_through_flex_equal_plain_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled on a device, run operation by operation: PyTorch refuses its backward pass on a CPU."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(Flex, "check", lambda *_, **__: None)
    compiled = torch.compile(torch_flex.flex_attention, dynamic=True, backend="aot_eager")
    monkeypatch.setattr(flex, "flex_attention", compiled)
    folder, data = rig.write_model("gemma2", tmp_path), rig.batch()
    loss, want = rig.plain_gradients(folder, data)
    made = rig.backend(folder, max_grad_norm=None, micro_batch_tokens=40, attention="flex",
                       gradient_checkpointing="full")  # fmt: skip
    got_loss, got = rig.gradients(made, data)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    rig.assert_close(got, want, 2e-6)


@pytest.mark.parametrize("reach", [None, Reach(3), Reach(200), Reach(150, chunked=True)])
def test_blocks_hold_what_tokens_look_at(reach: Reach | None) -> None:
    lengths = (512, 300, 128, 5, 1, 1)  # the second begins where a block does
    kernel = Flex(lengths, CPU)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])

    def looks(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (sequence[query] == sequence[key]) & (key <= query)
        return seen if reach is None else seen & (position[key] >= reach.first(position[query]))

    made = []
    kernel_mask = flex.block_mask

    def kept(first: Tensor) -> Any:
        made.append(kernel_mask(first))
        return made[-1]

    query, key, value = (torch.randn(1, heads, sum(lengths), 8) for heads in (4, 2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "block_mask", kept)
        for _ in range(2):
            got = kernel(query, key, value, reach, scaling=0.3, softcap=None)
    assert len(made) == 1  # for all layers
    tokens = sum(lengths)
    want = torch_flex.create_block_mask(looks, 1, 1, tokens, tokens, device="cpu")
    assert made[0].to_dense().equal(want.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert getattr(made[0], name).equal(getattr(want, name)), name
    other = Sdpa(lengths, CPU)(query, key, value, reach, scaling=0.3, softcap=None)
    torch.testing.assert_close(got, other, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "make, config",
    [
        (create_sliding_window_causal_mask, MistralConfig(sliding_window=3)),
        (create_chunked_causal_mask, Llama4TextConfig(attention_chunk_size=3)),
    ],
)
@pytest.mark.parametrize("share", [slice(None), slice(4, 8)])
def test_windows_and_chunks_are_those_of_transformers(make: Any, config: Any, share: slice) -> None:
    attention.register()
    position = torch.cat([torch.arange(7), torch.arange(5)])[None]

    def mask(implementation: str, part: slice) -> Any:
        config._attn_implementation = implementation
        return make(config=config, inputs_embeds=torch.zeros(1, 12, 4)[:, part], attention_mask=None, cache=None,
                    position_ids=position[:, part])  # fmt: skip

    want = mask("sdpa", slice(0, 7))
    kernel = Sdpa((7, 5), CPU)
    with attention.packed(Packing(kernel, 7)):  # type: ignore[arg-type]
        reach = mask(attention.NAME, share)
    assert kernel._mask(reach, CPU).equal(want)
    with attention.packed(Packing(kernel, 3)):  # type: ignore[arg-type]
        assert mask(attention.NAME, share) is None


def reference(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, longest: int, longest_key: int, *,
    scale: float | None, window_size: tuple[int, int], softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """What flash kernels document: tokens before and after a token's own that it looks at, -1 for all."""
    assert ends.equal(key_ends) and ends.dtype == torch.int32 and longest == longest_key == int(ends.diff().max())
    before, after = window_size
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    parts = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        hidden = (distance > before if before >= 0 else False) | (-distance > after if after >= 0 else False)
        parts.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


def varlen_attn(query, key, *rest, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa or query.shape[1] == key.shape[1]
    return reference(query, key, *rest, scale=scale, window_size=window_size)


def flash_attn_varlen_func(*tensors, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    assert causal and window_size[1] == 0
    return reference(*tensors, scale=softmax_scale, window_size=window_size, softcap=softcap)


@pytest.mark.parametrize("name, family", [("varlen", "qwen3"), ("varlen", "mixtral"), ("flash_attention_2", "gemma2")])
def test_flash_kernels_are_called_as_they_document(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package: Any = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(KERNELS[name], "check", lambda *_, **__: None)
    folder, data = rig.write_model(family, tmp_path), rig.batch()
    loss, want = rig.plain_gradients(folder, data)
    made = rig.backend(folder, max_grad_norm=None, micro_batch_tokens=40, attention=name)
    got_loss, got = rig.gradients(made, data)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    rig.assert_close(got, want, 2e-6)


def test_where_kernels_do_not_run_is_said(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="varlen runs on devices of type cuda, not on cpu"):
        rig.backend(qwen2, attention="varlen", model={"dtype": "bfloat16"})
    with pytest.raises(UserError, match="flex has no backward pass on a CPU"):
        rig.backend(qwen2, attention="flex")
    for name in ("varlen", "flash_attention_2"):
        with pytest.raises(UserError, match="half precision, not in float32") as raised:
            KERNELS[name].check(CUDA, torch.float32, learns=False)
        assert "compute_dtype" in str(raised.value.mend)
    with pytest.raises(UserError, match="not known to run on privateuseone"):
        Flex.check(torch.device("privateuseone"), torch.float32, learns=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="flash-attn, not installed") as raised:
        FlashAttention2.check(CUDA, torch.bfloat16, learns=True)
    assert "pip install flash-attn --no-build-isolation" in str(raised.value.mend)
    with pytest.raises(UserError, match="needs triton"):
        Flex.check(CUDA, torch.bfloat16, learns=True)
    monkeypatch.setattr(torch_varlen, "varlen_attn", lambda query, key: None)
    with pytest.raises(UserError, match="no attention over"):
        Varlen.check(CUDA, torch.bfloat16, learns=True)


def test_what_kernels_do_not_compute_is_refused() -> None:
    query, odd = torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 6, 12)
    kernel = Varlen((4, 2), CPU)
    with pytest.raises(UserError, match="soft-capped"):
        kernel(query, query, query, None, scaling=None, softcap=5.0)
    with pytest.raises(UserError, match="within chunks"):
        kernel(query, query, query, Reach(3, chunked=True), scaling=None, softcap=None)
    for tensors in ((odd, odd, odd), (query, query, torch.zeros(1, 2, 6, 16))):
        with pytest.raises(UserError, match="heads of one size"):
            kernel(*tensors, None, scaling=None, softcap=None)
    with attention.packed(Packing(Sdpa((4, 2), CPU), 4)):  # type: ignore[arg-type]
        with pytest.raises(UserError, match="mask of the model's own"):
            attention.attention_mask(use_vmap=True, config=MistralConfig())
        with pytest.raises(UserError, match="mask of the model's own"):
            attention.attention(torch.nn.Identity(), query, query, query, torch.ones(1, 1, 6, 6))


@pytest.mark.parametrize("options", [{"attention": "flex"}, {"compile": True}])
def test_a_reward_model_runs_no_packed_rows(options: dict) -> None:
    chosen, plain = FSDPConfig(**options), FSDPConfig()
    run: Any = SimpleNamespace(actor=SimpleNamespace(backend=chosen), reward_model=SimpleNamespace(backend=chosen))
    run.critic = None
    (problem,) = chosen.check(run, None)  # type: ignore[arg-type]
    assert problem.key == next(iter(options)) and "reward_model.backend" in problem.mend
    run.reward_model.backend = plain
    assert not list(chosen.check(run, None))  # type: ignore[arg-type]
