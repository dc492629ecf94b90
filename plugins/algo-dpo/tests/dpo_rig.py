"""A tiny Llama with real engines, and the losses of pairs written out row by row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
def length(response: str) -> float:
    return float(len(response))


def fussy(response: str, prompt: str) -> float:
    return float(len(response)) if prompt in ("1=", "456=") else 0.5
"""
PAIRS = [("1=", "12", "3"), ("23=", "4", "567"), ("456=", "8", "9"), ("7890=", "123", "45")]


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
    """A policy, another model as reference, pairs of unequal length, a reward, and a config."""
    write_model(folder / "policy", 1)
    write_model(folder / "other", 2)
    (folder / "judge.py").write_text(REWARD)
    records = [{"prompt": p, "chosen": y, "rejected": n, "note": "x"} for p, y, n in PAIRS]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    run = {
        "model": {"path": str(folder / "policy")},
        "algorithm": {"name": "dpo", "beta": 0.5},
        "actor": {
            "backend": {"name": "fsdp"}, "mini_batch_prompts": 2,
            "optimizer": {"name": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0},
        },
        "ref": {"backend": {"name": "fsdp"}, "model": {"path": str(folder / "other")}},
        "rollout": {"name": "hf", "max_response_tokens": 6},
        "data": {
            "batch_prompts": 4,
            "train": {"name": "jsonl", "path": str(folder / "pairs.jsonl"), "answer_key": None,
                      "response_key": "chosen", "rejected_key": "rejected"},
        },
        "rewards": [{"name": "function", "path": f"{folder / 'judge.py'}:length"}],
        "hardware": {"name": "cpu"},
        "trainer": {"steps": 4, "run_dir": str(folder / "run")},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def config(path: Path, *overrides: str) -> RunConfig:
    return load_config(path, overrides, get_registry()).run


class Opened:
    """A session with the config's algorithm on it, in step 1."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.run = config(path, *overrides)
        self.session = Session(self.run)
        self.session.progress.step = 1
        self.roles = self.session.roles
        self.algorithm = resolve("algorithms", self.run.algorithm.name)(self.run.algorithm)

    def collect(self) -> DataProto:
        assert self.session.train_prompts is not None
        return self.algorithm.collect(self.roles, self.session.train_prompts.next_batch(self.run.data.batch_prompts))

    def learn(self, batch: DataProto) -> dict[str, Tensor]:
        """The weights after learning from a batch."""
        self.metrics = {name: metric.result() for name, metric in self.algorithm.learn(self.roles, batch).items()}
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        model = self.session.policy.worker.actor.model
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def rows_of_updates(self, pairs: DataProto) -> list[list[int]]:
        """Row numbers of each mini-batch, epoch after epoch."""
        numbered = pairs.with_columns(row=torch.arange(len(pairs)))
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


def plain_log_probs(model: Any, batch: DataProto, temperature: float = 1.0) -> list[Tensor]:
    """Of each row, the log-probs of the response's tokens, by a call of the model on that row alone."""
    rows = []
    for row in range(len(batch)):
        ids = batch["input_ids"][row][batch["attention_mask"][row] == 1]
        answer = batch["responses"][row][batch["response_mask"][row] == 1]
        log_p = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
        start = int(batch["attention_mask"][row][: batch["prompts"].shape[1]].sum()) - 1
        rows.append(torch.stack([log_p[start + at, token] for at, token in enumerate(answer.tolist())])
                    if len(answer) else log_p[0, :0])  # fmt: skip
    return rows


def pair_loss(margin: Tensor, beta: float, kind: str, smoothing: float = 0.0) -> Tensor:
    if kind == "sigmoid":
        sigma = 1 / (1 + torch.exp(-beta * margin))
        return -(1 - smoothing) * torch.log(sigma) - smoothing * torch.log(1 - sigma)
    if kind == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    return 1 - beta * margin if 1 - beta * margin > 0 else 0 * margin


def mean_over_pairs(log_ratios: Sequence[Tensor], better: Sequence[tuple[int, int]], **options: Any) -> Tensor:
    """The mean loss of pairs ``(better row, worse row)``; a log-ratio is a number a token."""
    total: Any = 0.0
    for won, lost in better:
        total = total + pair_loss(log_ratios[won].sum() - log_ratios[lost].sum(), **options)
    return total / len(better)


def learn_plainly(
    run: RunConfig, pairs: DataProto, updates: Sequence[Sequence[int]], alive: Callable[[int], bool] = lambda row: True
) -> dict[str, Tensor]:
    """The weights after one AdamW step a mini-batch of pairs, whose rows 2k and 2k + 1 are better and worse."""
    model = plain_model(run.model.path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.actor.optimizer.lr, eps=1e-3, weight_decay=0.0)
    c = run.algorithm
    options = {"beta": c.beta, "kind": getattr(c, "kind", "sigmoid"), "smoothing": getattr(c, "label_smoothing", 0.0)}
    temperature = run.rollout.temperature if c.name != "dpo" else 1.0
    for rows in updates:
        better = [(row, row + 1) for row in rows if row % 2 == 0 and alive(row)]
        if not better:
            continue
        optimizer.zero_grad()
        log_probs = plain_log_probs(model, pairs, temperature)
        mask = pairs["response_mask"] == 1
        ratios = [p - ref[m] for p, ref, m in zip(log_probs, pairs["ref_log_probs"], mask)]
        mean_over_pairs(ratios, better, **options).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.actor.max_grad_norm or math.inf)
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
