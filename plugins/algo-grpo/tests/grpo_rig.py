"""GRPO on a tiny Llama, written out in plain PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain import DataProto
from drivetrain.seam import registry
from drivetrain.seam.discovery import scan
from drivetrain.testing import tiny
from drivetrain.testing.tiny import assert_same, config, distance, opened, plain_model, plain_outputs

__all__ = ["assert_same", "config", "distance", "opened", "plain_model", "plain_outputs"]

INSTALLED = scan()
FUSSY = """

def fussy(response: str, prompt: str) -> float:
    if prompt == "23=":
        raise LookupError("the judge is out")
    return len(response)
"""


ENGINES = {"backend": "fsdp", "optimizer": "adamw", "rollout": "hf"}


def write_run(folder: Path) -> Path:
    """A run of GRPO with two mini-batches a step."""
    algorithm = {"name": "grpo", "group_size": 3, "clip_high": 0.3}
    return tiny.write_run(folder, algorithm, **ENGINES, judge=tiny.REWARD + FUSSY, mini_batch_prompts=2)


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


def learn_plainly(run: Any, batch: DataProto, updates: Sequence[Sequence[int]], loss: Any = None) -> Any:
    """The weights after one AdamW step a mini-batch."""
    return tiny.learn_plainly(run, batch, updates, loss or grpo_loss)


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


def with_distribution(
    run_file: Path, site: Path, monkeypatch: pytest.MonkeyPatch, distribution: str, files: Mapping[str, str]
) -> Iterator[Path]:
    """A config that leaves the options of ``clip`` alone, while a distribution is among what is installed."""
    before = registry.get_registry()
    install(site, distribution, files)
    monkeypatch.syspath_prepend(str(site))
    path = run_file.with_name("parts.yaml")
    path.write_text(run_file.read_text().replace("  clip_high: 0.3\n", ""))
    use(registry.Registry([*INSTALLED, *scan([str(site)])]))
    yield path
    use(before)


def use(made: registry.Registry) -> None:
    """Make a registry that of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "Registry", lambda *_: made)
        registry.get_registry.cache_clear()
        registry.get_registry()
