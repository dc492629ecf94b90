"""A tiny Llama with real engines, and SPPO on it written out in plain PyTorch."""

from __future__ import annotations

import json
import math
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
    return float(len(set(response)))


def share(response: str) -> float:
    return len(set(response)) / 10


def constant(response: str) -> float:
    return 0.25
"""


def write_run(folder: Path) -> Path:
    """A random policy of characters far from uniform, prompts of unequal length, rewards, and a config."""
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
    (folder / "judge.py").write_text(REWARD)
    prompts = [{"prompt": text} for text in ("1=", "23=", "456=", "7890=")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    run = {
        "model": {"path": str(folder / "policy")},
        "algorithm": {"name": "sppo", "group_size": 3, "eta": 4.0},
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


def judged_by(path: Path, function: str) -> str:
    """The override that takes another reward."""
    return f"rewards=[{{name: function, path: '{path.parent / 'judge.py'}:{function}'}}]"


def config(path: Path, *overrides: str) -> RunConfig:
    return load_config(path, overrides, get_registry()).run


class Opened:
    """A session with SPPO on it, in step 1."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.run = config(path, *overrides)
        self.session = Session(self.run)
        self.session.progress.step = 1
        self.roles = self.session.roles
        self.sppo = resolve("algorithms", "sppo")(self.run.algorithm)

    def collect(self) -> DataProto:
        assert self.session.train_prompts is not None
        return self.sppo.collect(self.roles, self.session.train_prompts.next_batch(self.run.data.batch_prompts))

    def learn(self, batch: DataProto) -> dict[str, Tensor]:
        """The weights after learning from a batch."""
        self.metrics = self.sppo.learn(self.roles, batch)
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        model = self.session.policy.worker.actor.model
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def prompts_of_updates(self, batch: DataProto) -> list[list[str]]:
        """The prompts of each mini-batch, epoch after epoch."""
        epochs = range(self.run.algorithm.epochs)
        return [list(dict.fromkeys(part["uid"].tolist()))
                for epoch in epochs for part in self.roles.actor.mini_batches(batch, epoch)]  # fmt: skip


@contextmanager
def opened(path: Path, *overrides: str) -> Iterator[Opened]:
    made = Opened(path, *overrides)
    with made.session:
        yield made


def plain_model(folder: Path) -> Any:
    """The model as transformers runs it by itself."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def plain_log_probs(model: Any, batch: DataProto, row: int) -> Tensor:
    """Log-probability of the tokens of one response, (tokens,), of a row without its padding."""
    real = batch["attention_mask"][row] == 1
    tokens = batch["input_ids"][row][real]
    length = int(batch["response_mask"][row].sum())
    log_p = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
    return log_p.gather(1, tokens[1:, None])[-length:, 0]


def plain_win_rate(score: float, others: Sequence[float], preference: str, temperature: float = 1.0) -> float:
    """The mean win probability over the samples of a prompt, oneself among them."""
    total = 0.0
    for other in others:
        if preference == "bradley_terry":
            total += 1 / (1 + math.exp((other - score) / temperature))
        elif score > other:
            total += 1.0
        elif score == other:
            total += 0.5
    return total / len(others)


def learn_plainly(run: RunConfig, batch: DataProto, updates: Sequence[Sequence[str]], targets: Mapping[int, float]
                  ) -> dict[str, Tensor]:  # fmt: skip
    """The weights after one AdamW step a mini-batch; `targets` are the win probabilities of the rows learnt."""
    model = plain_model(run.model.path)
    with torch.no_grad():
        opponent = {row: plain_log_probs(model, batch, row).sum() for row in targets}
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.actor.optimizer.lr, eps=1e-3, weight_decay=0.0)
    for prompts in updates:
        rows = [row for row in targets if batch["uid"][row] in prompts]
        optimizer.zero_grad()
        loss = torch.zeros(())
        for row in rows:
            log_ratio = plain_log_probs(model, batch, row).sum() - opponent[row]
            loss = loss + (log_ratio - run.algorithm.eta * (targets[row] - 0.5)) ** 2 / len(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.actor.max_grad_norm)
        optimizer.step()
    return dict(model.named_parameters())
