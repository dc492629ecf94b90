"""A tiny Llama with real engines, whose answers are right by chance, and DAPO on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drivetrain import DataProto, RunConfig
from drivetrain.config.resolve import load_config
from drivetrain.driver.session import Session
from drivetrain.seam.registry import get_registry, resolve

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>"}
REWARDS = """
def seldom(response: str) -> bool:
    return response[-1:] in ("3", "7")

def always(response: str) -> bool:
    return True

def length(response: str) -> float:
    return len(response)
"""


def write_run(folder: Path) -> Path:
    """A policy, prompts of unequal length, rewards, and a config in which some prompts have answers of both kinds."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL.values(), *"0123456789="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder / "policy")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, tie_word_embeddings=True, initializer_range=0.25,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    (folder / "judge.py").write_text(REWARDS)
    prompts = [{"prompt": f"{7**n % 10 ** (n % 4 + 1)}="} for n in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    run = {
        "model": {"path": str(folder / "policy")},
        "algorithm": {"name": "dapo", "group_size": 3},
        "actor": {
            "backend": {"name": "fsdp"}, "mini_batch_prompts": 2,
            "optimizer": {"name": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0},
        },
        "rollout": {"name": "hf", "max_response_tokens": 6},
        "data": {
            "batch_prompts": 4, "train": {"name": "jsonl", "path": str(folder / "prompts.jsonl"), "answer_key": None},
        },
        "rewards": [{"name": "function", "path": f"{folder / 'judge.py'}:seldom"}],
        "hardware": {"name": "cpu"},
        "trackers": [{"name": "jsonl"}],
        "trainer": {"steps": 4, "run_dir": str(folder / "run")},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def config(path: Path, *overrides: str) -> RunConfig:
    return load_config(path, overrides, get_registry()).run


def reward(path: Path, name: str) -> str:
    return f"rewards=[{{name: function, path: '{path.parent / 'judge.py'}:{name}'}}]"


class Opened:
    """A session with DAPO on it, in step 1."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.run = config(path, *overrides)
        self.session = Session(self.run)
        self.session.progress.step = 1
        self.roles = self.session.roles
        self.dapo = resolve("algorithms", "dapo")(self.run.algorithm)

    def collect(self) -> DataProto:
        return self.dapo.collect(self.roles, self.roles.prompts.draw(self.run.data.batch_prompts))

    def learn(self, batch: DataProto) -> dict[str, Tensor]:
        """The weights after learning from a batch."""
        self.metrics = {name: metric.result() for name, metric in self.dapo.learn(self.roles, batch).items()}
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        model = self.session.policy.worker.actor.model
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def next_step(self) -> None:
        self.session.progress.step += 1


@contextmanager
def opened(path: Path, *overrides: str) -> Iterator[Opened]:
    made = Opened(path, *overrides)
    with made.session:
        yield made


def uids(batch: DataProto) -> list[str]:
    """The prompts of a batch, in order."""
    return list(dict.fromkeys(batch["uid"].tolist()))


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((ours[name] - tensor).abs().max()) for name, tensor in theirs.items())
