"""A tiny Llama with real engines, and PPO on it written out in plain PyTorch."""

from __future__ import annotations

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
    trained = {
        "backend": {"name": "fsdp"}, "optimizer": {"name": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0},
    }  # fmt: skip
    run = {
        "model": {"path": str(folder / "policy")},
        "algorithm": {"name": "ppo", "group_size": 2, "clip_high": 0.3, "gamma": 0.9, "lam": 0.8},
        "actor": {**trained, "mini_batch_prompts": 2},
        "critic": {**trained, "max_grad_norm": 0.3, "schedule": {"name": "linear"}},
        "rollout": {"name": "hf", "max_response_tokens": 6},
        "data": {
            "batch_prompts": 4, "train": {"name": "jsonl", "path": str(folder / "prompts.jsonl"), "answer_key": None},
        },
        "rewards": [{"name": "function", "path": f"{folder / 'judge.py'}:variety"}],
        "hardware": {"name": "cpu"},
        "trackers": [{"name": "jsonl"}],
        "trainer": {"steps": 4, "run_dir": str(folder / "run")},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def kl_options(path: Path) -> list[str]:
    """Charge the KL divergence from the other model."""
    return ["algorithm.kl_coef=0.1", "ref.backend.name=fsdp", f"ref.model.path={path.parent / 'other'}"]


def config(path: Path, *overrides: str) -> RunConfig:
    return load_config(path, overrides, get_registry()).run


class Opened:
    """A session with PPO on it, in step 1."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.run = config(path, *overrides)
        self.session = Session(self.run)
        self.session.progress.step = 1
        self.roles = self.session.roles
        self.ppo = resolve("algorithms", "ppo")(self.run.algorithm)

    def collect(self) -> DataProto:
        assert self.session.train_prompts is not None
        return self.ppo.collect(self.roles, self.session.train_prompts.next_batch(self.run.data.batch_prompts))

    def learn(self, batch: DataProto) -> None:
        self.metrics = {name: metric.result() for name, metric in self.ppo.learn(self.roles, batch).items()}

    def actor(self) -> dict[str, Tensor]:
        """The policy's weights."""
        return copies(self.session.policy.worker.actor.model)

    def critic(self) -> dict[str, Tensor]:
        """The critic's weights."""
        return copies(self.session.critic.worker.backends["critic"].model)

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


def copies(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain_model(folder: Path) -> Any:
    """The model as transformers runs it by itself."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def hidden_states(model: Any, batch: DataProto) -> Tensor:
    """Of the token before each response token, from padded rows."""
    real, responses = batch["attention_mask"], batch["responses"]
    positions = (real.cumsum(1) - 1).clamp(min=0)
    out = model.model(input_ids=batch["input_ids"], attention_mask=real, position_ids=positions)
    return out.last_hidden_state[:, -responses.shape[1] - 1 : -1]


def plain_log_probs(model: Any, batch: DataProto) -> tuple[Tensor, Tensor]:
    """Log-probs of the responses' tokens and entropies of their distributions."""
    log_p = model.lm_head(hidden_states(model, batch)).log_softmax(-1)
    return log_p.gather(2, batch["responses"][:, :, None])[:, :, 0], -(log_p.exp() * log_p).sum(-1)


def plain_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages before whitening, and returns: backwards through the tokens of each row."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for row in range(len(values)):
        following, advantage = 0.0, 0.0
        for t in reversed(range(values.shape[1])):
            if mask[row, t]:
                delta = rewards[row, t] + gamma * following - values[row, t]
                advantage = delta + gamma * lam * advantage
                following = values[row, t]
                advantages[row, t], returns[row, t] = advantage, advantage + values[row, t]
    return advantages, returns


def plain_whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    chosen = advantages[mask == 1]
    return torch.where(mask == 1, (advantages - chosen.mean()) / (chosen.var() + 1e-8).sqrt(), 0.0)


def policy_loss(log_probs: Tensor, entropy: Tensor, batch: DataProto, c: Any) -> Tensor:
    """Minus the mean over tokens of min(r A, clip(r) A) + entropy_coef H."""
    mask, advantage = batch["response_mask"] == 1, batch["advantages"]
    ratio = (log_probs - batch["old_log_probs"]).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - c.clip_low, 1 + c.clip_high) * advantage)
    if c.clip_dual:
        gain = torch.where(advantage < 0, torch.maximum(gain, c.clip_dual * advantage), gain)
    return -(gain + c.entropy_coef * entropy)[mask].mean()


def value_loss(values: Tensor, batch: DataProto, c: Any) -> Tensor:
    """The mean over tokens of max((V - R)^2, (clip(V) - R)^2) / 2."""
    mask, old, returns = batch["response_mask"] == 1, batch["values"], batch["returns"]
    clipped = torch.minimum(torch.maximum(values, old - c.clip_value), old + c.clip_value)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)[mask].mean()


def learn_plainly(
    run: RunConfig, batch: DataProto, updates: Sequence[Sequence[int]], head: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of actor and critic after one AdamW step each a mini-batch; ``head`` is the critic's at first."""
    policy, trunk = plain_model(run.model.path), plain_model(run.model.path)
    weight, bias = head.clone().requires_grad_(), torch.zeros(1, requires_grad=True)
    critic = {f"model.{name}": p for name, p in trunk.model.named_parameters()}
    critic |= {"score.weight": weight, "score.bias": bias}
    options = {"eps": 1e-3, "weight_decay": 0.0}
    optimizers = (
        torch.optim.AdamW(policy.parameters(), lr=1e-2, **options),
        torch.optim.AdamW(critic.values(), lr=0.75e-2, **options),  # linear, step 1 of 4
    )
    for rows in updates:
        part = batch[list(rows)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        policy_loss(*plain_log_probs(policy, part), part, run.algorithm).backward()
        value_loss(hidden_states(trunk, part) @ weight[0] + bias, part, run.algorithm).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), run.actor.max_grad_norm)
        torch.nn.utils.clip_grad_norm_(critic.values(), run.critic.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
    return copies(policy), {name: p.detach() for name, p in critic.items()}


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], atol: float = 2e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    return max(float((ours[name] - tensor).abs().max()) for name, tensor in theirs.items())
