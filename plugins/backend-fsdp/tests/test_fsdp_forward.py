"""Log-probabilities and entropies from packed rows."""

from pathlib import Path

import fsdp_rig as rig
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import PluginError, RunError, UserError


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_transformers_row_by_row(any_model: Path, temperature: float) -> None:
    data = rig.batch()
    made = rig.backend(any_model, learns=False, micro_batch_tokens=40, log_prob_chunk_tokens=5)
    result = made.forward(data, ["log_probs", "entropy"], temperature=temperature)
    model = rig.plain(any_model)
    for row in range(len(data)):
        real = data.batch["attention_mask"][row] == 1
        prompt, total = int(real[: rig.PROMPT].sum()), int(real.sum())
        with torch.no_grad():
            logits = model(input_ids=data.batch["input_ids"][row][real][None], use_cache=False).logits[0].double()
        log_p = (logits[prompt - 1 : total - 1] / temperature).log_softmax(-1)
        tokens = data.batch["responses"][row, : total - prompt]
        want = torch.zeros(2, rig.RESPONSE, dtype=torch.float64)
        want[0, : total - prompt] = log_p.gather(1, tokens[:, None])[:, 0]
        want[1, : total - prompt] = -(log_p.exp() * log_p).sum(-1)
        got = torch.stack([result["log_probs"][row], result["entropy"][row]])
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["cohere", "granite"])
def test_what_families_do_to_logits(family: str, tmp_path: Path) -> None:
    folder, data = rig.write_model(family, tmp_path), rig.batch(4)
    got = rig.backend(folder, learns=False).forward(data, ["log_probs"], temperature=1.0)["log_probs"]
    with torch.no_grad():
        want, _ = rig.plain_outputs(rig.plain(folder), data)
    real = data.batch["attention_mask"][:, rig.PROMPT :] == 1
    torch.testing.assert_close(got[real], want[real].float(), atol=1e-5, rtol=1e-5)


def test_unknown_treatment_of_logits_is_refused(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen2ForCausalLM

    plain = Qwen2ForCausalLM.forward

    def bent(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", bent)
    with pytest.raises(UserError, match="other logits than by itself"):
        rig.backend(qwen2, learns=False)


def test_layers_that_look_across_sequences_are_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="other logits than by itself"):
        rig.backend(tmp_path, learns=False)


def test_padding_columns_and_order_do_not_matter(qwen2: Path) -> None:
    made = rig.backend(qwen2, learns=False)
    narrow = made.forward(rig.batch(), ["log_probs"], temperature=1.0)["log_probs"]
    wide = made.forward(rig.batch(prompt=12, response=15), ["log_probs"], temperature=1.0)["log_probs"]
    torch.testing.assert_close(wide[:, : rig.RESPONSE], narrow, atol=1e-6, rtol=0)
    assert not wide[:, rig.RESPONSE :].any()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = made.forward(rig.batch()[order], ["log_probs"], temperature=1.0)["log_probs"]
    torch.testing.assert_close(shuffled, narrow[order], atol=1e-6, rtol=0)


class Largest(TorchDispatchMode):
    """The most elements of any floating tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.elements = max(self.elements, tensor.numel())
        return result


def test_logits_of_all_tokens_never_exist(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**rig.SMALL | {"vocab_size": 1000, "hidden_size": 8, "intermediate_size": 8,
                                                "num_key_value_heads": 4})).save_pretrained(tmp_path)  # fmt: skip
    data = rig.batch(24)
    tokens = int(data.batch["response_mask"].sum())
    made = rig.backend(tmp_path, log_prob_chunk_tokens=8)
    with Largest() as forward:
        made.forward(data, ["log_probs", "entropy"], temperature=1.0)
    with Largest() as update:
        made.update(data, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
    assert max(forward.elements, update.elements) <= 8 * 1000 < tokens * 1000


def test_live_module_generates_as_with_sdpa(any_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    live = rig.backend(any_model, learns=False).live_module()
    implementation = "eager" if "gemma2" in any_model.name else "sdpa"
    own = AutoModelForCausalLM.from_pretrained(any_model, attn_implementation=implementation)
    data = rig.batch(4)
    prompt = {"input_ids": data.batch["input_ids"][:, : rig.PROMPT],
              "attention_mask": data.batch["attention_mask"][:, : rig.PROMPT]}  # fmt: skip
    options = {"max_new_tokens": 12, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    ours, theirs = live.generate(**prompt, **options), own.generate(**prompt, **options)
    assert ours.sequences.equal(theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(theirs.scores), atol=1e-5, rtol=1e-5)


def test_bfloat16_compute_is_close(qwen2: Path) -> None:
    data = rig.batch()
    fine = rig.backend(qwen2, learns=False).forward(data, ["log_probs"], temperature=1.0)["log_probs"]
    made = rig.backend(qwen2, learns=False, compute_dtype="bfloat16")
    coarse = made.forward(data, ["log_probs"], temperature=1.0)["log_probs"]
    assert coarse.dtype == torch.float32
    difference = (fine - coarse).abs()
    assert 0 < float(difference.max()) and float(difference.mean()) < 0.05


def test_what_is_wrong_is_said(qwen2: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        rig.backend(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no config.json"):
        rig.backend(tmp_path)
    with pytest.raises(UserError, match="Triton does not run on cpu here.*backend.log_prob_kernel"):
        rig.backend(qwen2, log_prob_kernel="triton")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UserError, match="does not load as a causal language model"):
        rig.backend(tmp_path)
    (tmp_path / "config.json").write_text((qwen2 / "config.json").read_text())
    with pytest.raises(UserError, match="does not load"):
        rig.backend(tmp_path)
    with pytest.raises(UserError, match="float16"):
        rig.backend(qwen2, model={"dtype": "float16"})
    made, data = rig.backend(qwen2, learns=False), rig.batch(3)
    with pytest.raises(PluginError, match="values"):
        made.forward(data, ["values"], temperature=1.0)
    with pytest.raises(UserError, match="temperature 0"):
        made.forward(data, ["log_probs"], temperature=0.0)
    with pytest.raises(UserError, match="not among the 50 tokens"):
        wrong = data.with_columns(input_ids=data.batch["input_ids"] + rig.VOCAB)
        made.forward(wrong, ["log_probs"], temperature=1.0)
    with pytest.raises(RunError, match="no token before it"):
        real = data.batch["attention_mask"].clone()
        real[1, : rig.PROMPT] = 0
        made.forward(data.with_columns(attention_mask=real), ["log_probs"], temperature=1.0)
    with pytest.raises(RunError, match="no optimizer"):
        made.update(data, rig.TERMS, rig.counts(data), temperature=1.0, lr_factor=1.0)
