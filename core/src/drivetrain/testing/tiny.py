"""A tiny Llama on real engines, to hold an algorithm against its formula written out in plain PyTorch.

Needs ``transformers``, and plugins that offer the engines that a test names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from drivetrain.config import RunConfig
from drivetrain.config.resolve import load_config
from drivetrain.driver.session import Session
from drivetrain.metrics import to_floats
from drivetrain.protocol import DataProto
from drivetrain.seam.registry import get_registry, resolve

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>"}
PROMPTS = ("1=", "23=", "456=", "7890=")
REWARD = """
def variety(response: str) -> float:
    return len(set(response)) + 0.1 * len(response)
"""


def write_model(folder: Path, seed: int) -> Path:
    """A random Llama whose distributions are far from uniform, with a tokenizer of characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


def write_run(
    folder: Path, algorithm: Mapping[str, Any], *, backend: str, optimizer: str, rollout: str, judge: str = REWARD,
    mini_batch_prompts: int | None = None,
    **sections: Any,
) -> Path:  # fmt: skip
    """A policy, another model (``other``), prompts of unequal length, rewards and ``run.yaml``.

    Args:
        algorithm: the section.
        backend: name of the engine that trains, whose module has a plain model's parameters.
        optimizer: name of an AdamW.
        rollout: name of the engine that generates.
        judge: functions that may be rewards, as Python; the first one is.
        mini_batch_prompts: of the actor.
        sections: of the config, in place of those that are written otherwise.
    """
    write_model(folder / "policy", 1)
    write_model(folder / "other", 2)
    (folder / "judge.py").write_text(judge)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    run = {
        "model": {"path": str(folder / "policy")},
        "algorithm": dict(algorithm),
        "actor": {
            "backend": {"name": backend}, "mini_batch_prompts": mini_batch_prompts,
            "optimizer": {"name": optimizer, "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0},
        },
        "rollout": {"name": rollout, "max_response_tokens": 6},
        "data": {
            "batch_prompts": 4, "train": {"name": "jsonl", "path": str(folder / "prompts.jsonl"), "answer_key": None},
        },
        "rewards": [{"name": "function", "path": f"{folder / 'judge.py'}:{re.findall('def ([a-z_]+)', judge)[0]}"}],
        "hardware": {"name": "cpu"},
        "trainer": {"steps": 4, "run_dir": str(folder / "run")},
        **sections,
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def config(path: Path, *overrides: str) -> RunConfig:
    """The resolved config of a file and ``section.key=value`` overrides."""
    return load_config(path, overrides, get_registry()).run


class Opened:
    """A session with an algorithm on it, in step 1."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.run = config(path, *overrides)
        self.session = Session(self.run)
        self.session.progress.step = 1
        self.roles = self.session.roles
        self.algorithm = resolve("algorithms", self.run.algorithm.name)(self.run.algorithm)
        self.metrics: dict[str, float] = {}

    def collect(self) -> DataProto:
        """The next batch."""
        assert self.session.train_prompts is not None
        prompts = self.session.train_prompts.next_batch(self.run.data.batch_prompts)
        collected: DataProto = self.algorithm.collect(self.roles, prompts)
        return collected

    def learn(self, batch: DataProto) -> dict[str, Tensor]:
        """The policy's weights after learning from a batch; sets ``metrics``."""
        self.metrics = to_floats(self.algorithm.learn(self.roles, batch))
        return self.weights()

    def weights(self, role: str = "actor") -> dict[str, Tensor]:
        """A copy of the weights of ``actor`` or ``critic``, by name."""
        group: Any = self.session.policy if role == "actor" else self.session.critic
        model = group.worker.backends[role].model
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def rows_of_updates(self, batch: DataProto) -> list[list[int]]:
        """Row numbers of each mini-batch, over the ``epochs`` of the section ``algorithm`` (1 without that key)."""
        numbered, epochs = batch.with_columns(row=torch.arange(len(batch))), getattr(self.run.algorithm, "epochs", 1)
        return [
            part["row"].tolist() for epoch in range(epochs) for part in self.roles.actor.mini_batches(numbered, epoch)
        ]


@contextmanager
def opened(path: Path, *overrides: str) -> Iterator[Opened]:
    """An :class:`Opened` whose workers end with the block."""
    made = Opened(path, *overrides)
    with made.session:
        yield made


def judged_by(path: Path, function: str) -> str:
    """The override that takes another function of the judge for the reward."""
    return f"rewards=[{{name: function, path: '{path.parent / 'judge.py'}:{function}'}}]"


def plain_model(folder: Path) -> Any:
    """The model as transformers runs it by itself."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def plain_outputs(model: Any, batch: DataProto, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of the responses' tokens and entropies of their distributions, from padded rows."""
    real, responses = batch["attention_mask"], batch["responses"]
    positions = (real.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=batch["input_ids"], attention_mask=real, position_ids=positions).logits
    log_p = (logits[:, -responses.shape[1] - 1 : -1] / temperature).log_softmax(-1)
    return log_p.gather(2, responses[:, :, None])[:, :, 0], -(log_p.exp() * log_p).sum(-1)


def learn_plainly(
    run: RunConfig, batch: DataProto, updates: Sequence[Sequence[int]],
    loss: Callable[[Tensor, Tensor, DataProto, Any], Tensor],
) -> dict[str, Tensor]:  # fmt: skip
    """The policy's weights after one AdamW step a mini-batch.

    Args:
        updates: rows of each mini-batch.
        loss: of log-probs and entropies (rows, response), the mini-batch and the section ``algorithm``.
    """
    model, optimizer_config = plain_model(run.model.path), run.actor.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=optimizer_config.lr, eps=1e-3, weight_decay=0.0)
    temperature = run.rollout.temperature if run.rollout else 1.0
    for rows in updates:
        part = batch[list(rows)]
        optimizer.zero_grad()
        loss(*plain_outputs(model, part, temperature), part, run.algorithm).backward()
        assert run.actor.max_grad_norm is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.actor.max_grad_norm)
        optimizer.step()
    return dict(model.named_parameters())


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], atol: float = 2e-5) -> None:
    """Weights by name agree; what packed and padded rows differ by in float32 is below the default."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        difference = float((ours[name] - tensor.detach()).abs().max())
        assert difference <= atol, f"{name} is off by {difference:.3g}"


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of a weight."""
    return max(float((ours[name] - tensor.detach()).abs().max()) for name, tensor in theirs.items())
