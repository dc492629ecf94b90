"""PPO on a tiny Llama, written out in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain import DataProto, RunConfig
from drivetrain.testing import tiny
from drivetrain.testing.tiny import assert_same, config, distance, opened, plain_model

__all__ = ["assert_same", "config", "distance", "opened", "plain_model"]


ENGINES = {"backend": "fsdp", "optimizer": "adamw", "rollout": "hf"}


def write_run(folder: Path) -> Path:
    """A run of PPO with two mini-batches a step."""
    trained = {
        "backend": {"name": "fsdp"}, "optimizer": {"name": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0},
    }  # fmt: skip
    algorithm = {"name": "ppo", "group_size": 2, "clip_high": 0.3, "gamma": 0.9, "lam": 0.8}
    return tiny.write_run(folder, algorithm, **ENGINES, actor={**trained, "mini_batch_prompts": 2},
                          critic={**trained, "max_grad_norm": 0.3, "schedule": {"name": "linear"}},
                          trackers=[{"name": "jsonl"}])  # fmt: skip


def kl_options(path: Path) -> list[str]:
    """Charge the KL divergence from the other model."""
    return ["algorithm.kl_coef=0.1", "ref.backend.name=fsdp", f"ref.model.path={path.parent / 'other'}"]


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
    return dict(policy.named_parameters()), {name: p.detach() for name, p in critic.items()}
