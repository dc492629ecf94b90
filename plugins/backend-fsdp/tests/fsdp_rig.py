"""Tiny models, a ragged batch, and the same mathematics in plain padded PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers import models as families

from drivetrain import BackendContext, DataProto, LossTerm, OptimizerConfig, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.numerics import Counts, LossInputs, group_index
from drivetrain_backend_fsdp.backend import FSDPBackend
from drivetrain_backend_fsdp.config import AdamWConfig, FSDPConfig

VOCAB, PROMPT, RESPONSE = 50, 7, 9
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 5}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                               "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                               "head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 5, "final_logit_softcapping": 5.0,
                          "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 5, "final_logit_softcapping": 5.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "granite": ("Granite", {"logits_scaling": 4.0}),
}  # fmt: skip
TERMS = (
    LossTerm(name="clip", args={"clip_low": 0.1, "clip_high": 0.3}),
    LossTerm(name="kl", weight=0.3, args={"aggregation": "seq-mean-token-mean"}),
    LossTerm(name="entropy", weight=0.1),
)


def write_model(family: str, folder: Path, **other: Any) -> Path:
    """A random model and a tokenizer that fits it; ``other`` are entries of its config."""
    name, options = FAMILIES[family]
    config_class = getattr(families, f"{name}TextConfig" if family == "gemma3" else f"{name}Config")
    torch.manual_seed(3)
    model = getattr(families, f"{name}ForCausalLM")(config_class(**SMALL | options | other))
    with torch.no_grad():  # norms that differ from one another, so that a mix-up shows
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer(folder)
    return folder


def tokenizer(folder: Path) -> None:
    """A tokenizer of one-letter words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w2").save_pretrained(folder)


def backend(
    folder: Path, *, rank: int = 0, world_size: int = 1, max_grad_norm: float | None = 1.0, learns: bool = True,
    model: Mapping[str, Any] | None = None, optimizer: Mapping[str, Any] | None = None, role: str = "actor",
    section: OptimizerConfig | None = None, hardware: str = "cpu", **options: Any,
) -> FSDPBackend:  # fmt: skip
    """A backend that is ready to work, with AdamW unless ``section`` names another optimizer."""
    context = BackendContext(
        role=role,
        model=ModelConfig(path=folder, **(model or {})),
        optimizer=(section or AdamWConfig(**{"lr": 1e-2} | dict(optimizer or {}))) if learns else None,
        max_grad_norm=max_grad_norm,
        hardware=resolve("hardware", hardware)(PluginConfig(name=hardware)),
        rank=rank,
        world_size=world_size,
        seed=5,
    )
    made = FSDPBackend(FSDPConfig(**options), context)
    made.initialize()
    return made


def batch(rows: int = 12, *, seed: int = 0, prompt: int = PROMPT, response: int = RESPONSE) -> DataProto:
    """Rows of all lengths, with tokens of an environment and with NaN wherever nothing may look.

    Wider ``prompt`` and ``response`` only add padding.
    """
    random = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rows, prompt + response, dtype=torch.long)
    real, mask = torch.zeros_like(ids), torch.zeros(rows, response, dtype=torch.long)
    columns = {name: torch.full((rows, response), torch.nan) for name in
               ("advantages", "old_log_probs", "ref_log_probs")}  # fmt: skip
    for row in range(rows):
        before = int(torch.randint(1, PROMPT + 1, (), generator=random))
        after = int(torch.randint(1, RESPONSE + 1, (), generator=random))
        span = slice(prompt - before, prompt + after)
        ids[row, span] = torch.randint(3, VOCAB, (before + after,), generator=random)
        real[row, span] = 1
        mask[row, :after] = (torch.rand(after, generator=random) < 0.8).long()
        advantage = torch.randn((), generator=random)
        for name, column in columns.items():
            drawn = torch.randn(after, generator=random)
            value = advantage if name == "advantages" else drawn * 0.3 - 4
            column[row, :after] = torch.where(mask[row, :after] == 1, value, torch.nan)
    mask[0] = 0  # a row without anything to learn
    return DataProto.from_single_dict(
        {"input_ids": ids, "attention_mask": real, "responses": ids[:, prompt:].clone(), "response_mask": mask,
         "uid": [f"p{row // 3}" for row in range(rows)], **columns}
    )  # fmt: skip


VALUE_TERMS = (LossTerm(name="value_clip", args={"clip_range": 0.4}),)


def critic(folder: Path, **options: Any) -> FSDPBackend:
    """A critic that is ready to work, its values large enough to tell apart."""
    made = backend(folder, **options | {"role": "critic"})
    with torch.no_grad():
        made.model.score.weight.copy_(sharded_like(made.model.score.weight, head(made)))
        made.model.score.bias.fill_(0.3)
    return made


def adapted(folder: Path, *, lora: Mapping[str, Any] | None = None, **options: Any) -> FSDPBackend:
    """A backend, a critic where the role is one, whose adapter is large enough to tell from none."""
    make = critic if options.get("role") == "critic" else backend
    made = make(folder, lora={"rank": 4, "alpha": 6} | dict(lora or {}), **options)
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(sharded_like(parameter, torch.randn(parameter.shape, generator=random) / 4))
    return made


def peft_like(made: FSDPBackend, model: Any) -> Any:
    """A plain model with peft's adapter, which is that of a backend of one process."""
    from peft import LoraConfig, get_peft_model

    ours = {name: p.detach().clone() for name, p in made.model.named_parameters() if ".lora_" in name}
    names = {name.split(".lora_")[0] for name in ours}
    theirs = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=sorted(names)))
    missing = theirs.base_model.model.load_state_dict(ours, strict=False)
    assert not missing.unexpected_keys
    return theirs


def head(made: FSDPBackend) -> Tensor:
    """The weight that :func:`critic` gives its head."""
    return torch.randn(1, made.model.score.in_features, generator=torch.Generator().manual_seed(7))


def sharded_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """A tensor, distributed as a parameter is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def critic_batch(rows: int = 12, **sizes: int) -> DataProto:
    """:func:`batch` with old values and returns, NaN wherever nothing may look."""
    data, random = batch(rows, **sizes), torch.Generator().manual_seed(4)
    mask = data.batch["response_mask"] == 1
    drawn = torch.randn(2, rows, RESPONSE, generator=random) * 2
    padded = torch.nn.functional.pad(drawn, (0, mask.shape[1] - RESPONSE))
    return data.with_columns(**{name: torch.where(mask, column, torch.nan) for name, column in
                                zip(("values", "returns"), padded)})  # fmt: skip


def plain_values(trunk: Any, weight: Tensor, bias: Tensor, data: DataProto) -> Tensor:
    """Values before each response token, from padded rows."""
    real = data.batch["attention_mask"]
    hidden = trunk(
        input_ids=data.batch["input_ids"], attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state  # fmt: skip
    width = data.batch["responses"].shape[1]
    return (hidden[:, -width - 1 : -1] @ weight[0]) + bias


def counts(data: DataProto) -> Counts:
    """Of the whole mini-batch."""
    return Counts.of(data.batch["response_mask"], group_index(data["uid"].tolist()))


def plain_outputs(model: Any, data: DataProto, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy from padded rows, all logits at once."""
    real = data.batch["attention_mask"]
    logits = model(
        input_ids=data.batch["input_ids"], attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    ).logits.double()  # fmt: skip
    width = data.batch["responses"].shape[1]
    log_p = (logits[:, -width - 1 : -1] / temperature).log_softmax(-1)
    return log_p.gather(2, data.batch["responses"][:, :, None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def plain_gradients(
    folder: Path, data: DataProto, terms: Any = TERMS, *, model: Any = None, temperature: float = 1.0
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the objective in one padded micro-batch; of the folder's model, or of another."""
    model = plain(folder) if model is None else model
    log_probs, entropy = plain_outputs(model, data, temperature)
    mask = data.batch["response_mask"] == 1
    inputs = LossInputs(
        log_probs=torch.where(mask, log_probs, 0).float(), entropy=torch.where(mask, entropy, 0).float()
    )
    loss = sum(
        term.weight * resolve("policy_losses", term.name)(inputs, data.batch, counts(data), **term.args).loss
        for term in terms
    )
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain(folder: Path) -> Any:
    """The model as transformers runs it by itself."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


class Recorder(torch.optim.SGD):
    """Keeps the gradients of its last step."""

    def __init__(self, backend: FSDPBackend, lr: float = 0.0) -> None:
        self.named = dict(backend.model.named_parameters())
        super().__init__(self.named.values(), lr=lr)
        self.param_groups[0]["initial_lr"] = lr
        self.gradients: dict[str, Tensor] = {}
        backend.optimizer = self

    def step(self, closure: Any = None) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.named.items() if p.grad is not None}
        super().step()


def gradients(made: FSDPBackend, data: DataProto, terms: Any = TERMS, temperature: float = 1.0) -> tuple[float, Any]:
    """Loss and gradients of an update that changes nothing."""
    recorder = Recorder(made)
    metrics = made.update(data, terms, counts(data), temperature=temperature, lr_factor=1.0)
    return metrics["loss"].result(), recorder.gradients


def assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], limit: float = 1e-6) -> None:
    """Equal names; differences below ``limit`` of the largest gradient of all."""
    assert ours.keys() == theirs.keys()
    scale = max(float(tensor.abs().max()) for tensor in theirs.values())
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).abs().max()) <= limit * scale, name
