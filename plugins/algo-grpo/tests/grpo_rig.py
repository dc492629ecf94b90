"""A tiny Llama with real engines, and GRPO on it written out in plain PyTorch."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drivetrain import DataProto, RunConfig
from drivetrain.config.resolve import load_config
from drivetrain.driver.session import Session
from drivetrain.seam.registry import get_registry, resolve

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>"}
REWARD = """
def variety(response: str) -> float:
    return len(set(response)) + 0.1 * len(response)


def fussy(response: str, prompt: str) -> float:
    if prompt == "23=":
        raise LookupError("the judge is out")
    return len(response)
"""


def write_model(folder: Path, seed: int) -> Path:
    """A random Llama whose distributions are far from uniform, with a tokenizer of characters."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL.values(), *"0123456789="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, tie_word_embeddings=True, initializer_range=0.25,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_run(folder: Path) -> Path:
    """A policy, another model as reference, prompts of unequal length, a reward, and a config."""
    write_model(folder / "policy", 1)
    write_model(folder / "other", 2)
    (folder / "judge.py").write_text(REWARD)
    prompts = [{"prompt": text} for text in ("1=", "23=", "456=", "7890=")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    run = {
        "model": {"path": str(folder / "policy")},
        "algorithm": {"name": "grpo", "group_size": 3, "clip_high": 0.3},
        "actor": {
            "backend": {"name": "fsdp"}, "mini_batch_prompts": 2,
            "optimizer": {"name": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0},
        },
        "rollout": {"name": "hf", "max_response_tokens": 6},
        "data": {
            "batch_prompts": 4, "train": {"name": "jsonl", "path": str(folder / "prompts.jsonl"), "answer_key": None},
        },
        "rewards": [{"name": "function", "path": f"{folder / 'judge.py'}:variety"}],
        "hardware": {"name": "cpu"},
        "trainer": {"steps": 4, "run_dir": str(folder / "run")},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def config(path: Path, *overrides: str) -> RunConfig:
    return load_config(path, overrides, get_registry()).run


class Opened:
    """A session with GRPO on it, in step 1."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.run = config(path, *overrides)
        self.session = Session(self.run)
        self.session.progress.step = 1
        self.roles = self.session.roles
        self.grpo = resolve("algorithms", "grpo")(self.run.algorithm)

    def collect(self) -> DataProto:
        assert self.session.train_prompts is not None
        return self.grpo.collect(self.roles, self.session.train_prompts.next_batch(self.run.data.batch_prompts))

    def learn(self, batch: DataProto) -> dict[str, Tensor]:
        """The weights after learning from a batch."""
        self.metrics = self.grpo.learn(self.roles, batch)
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        model = self.session.policy.worker.actor.model
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def rows_of_updates(self, batch: DataProto) -> list[list[int]]:
        """Row numbers of each mini-batch, epoch after epoch."""
        numbered = batch.with_columns(row=torch.arange(len(batch)))
        epochs = range(self.run.algorithm.epochs)
        return [part["row"].tolist() for epoch in epochs for part in self.roles.actor.mini_batches(numbered, epoch)]


@contextmanager
def opened(path: Path, *overrides: str) -> Iterator[Opened]:
    made = Opened(path, *overrides)
    with made.session:
        yield made


def plain_model(folder: Path) -> Any:
    """The model as transformers runs it by itself."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def plain_outputs(model: Any, batch: DataProto, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of the responses' tokens and entropies of their distributions, from padded rows."""
    real, responses = batch["attention_mask"], batch["responses"]
    positions = (real.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=batch["input_ids"], attention_mask=real, position_ids=positions).logits
    log_p = (logits[:, -responses.shape[1] - 1 : -1] / temperature).log_softmax(-1)
    return log_p.gather(2, responses[:, :, None])[:, :, 0], -(log_p.exp() * log_p).sum(-1)


def plain_advantages(scores: Tensor, uids: Sequence[str], by_std: bool = True) -> Tensor:
    """``(r_i - mean(r)) / (std(r) + 1e-6)`` over the samples of a prompt (rows,)."""
    out = []
    for score, uid in zip(scores, uids):
        group = torch.stack([other for other, its in zip(scores, uids) if its == uid])
        out.append((score - group.mean()) / (group.std() + 1e-6 if by_std else 1.0))
    return torch.stack(out)


KL = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: log_ratio**2 / 2,
    "k3": lambda log_ratio: log_ratio.exp() - 1 - log_ratio,
    "abs": lambda log_ratio: log_ratio.abs(),
}  # of log pi_ref - log pi


def aggregated(rows: Sequence[Tensor], how: str, scale: float | None) -> Tensor:
    """One number of the terms of each row's tokens."""
    match how:
        case "token-mean":
            return torch.cat(list(rows)).mean()
        case "token-sum":
            return torch.cat(list(rows)).sum()
        case "seq-mean-token-sum":
            return torch.stack([row.sum() for row in rows]).mean()
        case "seq-mean-token-mean":
            return torch.stack([row.mean() for row in rows]).mean()
        case "seq-mean-token-sum-norm":
            return torch.stack([row.sum() / scale for row in rows]).mean()
    raise AssertionError(how)


def grpo_loss(log_probs: Tensor, entropy: Tensor, batch: DataProto, c: Any) -> Tensor:
    """Minus the objective: min(r A, clip(r) A) - kl_coef KL + entropy_coef H, of each token, aggregated."""
    mask, advantage = batch["response_mask"] == 1, batch["advantages"]
    ratio = (log_probs - batch["old_log_probs"]).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - c.clip_low, 1 + c.clip_high) * advantage)
    if c.clip_dual:
        gain = torch.where(advantage < 0, torch.maximum(gain, c.clip_dual * advantage), gain)
    objective = gain + c.entropy_coef * entropy
    if c.kl_coef and c.kl_in == "loss":
        objective = objective - c.kl_coef * KL[c.kl_kind](batch["ref_log_probs"] - log_probs)
    return -aggregated([objective[row][mask[row]] for row in range(len(batch))], c.aggregation, c.scale)


def learn_plainly(run: RunConfig, batch: DataProto, updates: Sequence[Sequence[int]], loss: Any = grpo_loss) -> Any:
    """The weights after one AdamW step a mini-batch."""
    model = plain_model(run.model.path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.actor.optimizer.lr, eps=1e-3, weight_decay=0.0)
    for rows in updates:
        part = batch[list(rows)]
        optimizer.zero_grad()
        loss(*plain_outputs(model, part, run.rollout.temperature), part, run.algorithm).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.actor.max_grad_norm)
        optimizer.step()
    return dict(model.named_parameters())


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], atol: float = 2e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor.detach(), rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    return max(float((ours[name] - tensor.detach()).abs().max()) for name, tensor in theirs.items())


def install(site: Path, distribution: str, files: Mapping[str, str]) -> None:
    """Write a distribution with the entry point ``parts = <package>.plugin`` into a folder of packages."""
    package = distribution.replace("-", "_")
    info = site / f"{package}-1.0.dist-info"
    for folder in (site / package, info):
        folder.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[drivetrain]\nparts = {package}.plugin\n")
    for name, text in {"__init__.py": "", **files}.items():
        (site / package / name).write_text(text)
    importlib.invalidate_caches()
