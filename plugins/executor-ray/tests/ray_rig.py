"""A tiny model and workers for tests, in files that the processes of Ray can import."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drivetrain import DataProto, Worker, register
from drivetrain.config import RunConfig
from drivetrain.config.resolve import load_config
from drivetrain.metrics import Metric, Sum
from drivetrain.seam.registry import get_registry

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


def write_model(folder: Path) -> None:
    """A random Llama of 2 layers with a tokenizer of characters."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL.values(), *"0123456789+-=,"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **SPECIAL).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def config_of(folder: Path, *overrides: str) -> RunConfig:
    """A PPO run on the tiny model."""
    (folder / "prompts.jsonl").write_text('{"prompt": "1,2=", "answer": "2"}\n')
    base = [
        f"model.path={folder / 'model'}", "algorithm.name=ppo", "actor.backend.name=fsdp",
        "actor.optimizer={name: adamw, lr: 1.0e-2}", "rollout={name: hf, max_response_tokens: 3}",
        "hybrid_engine.name=colocated", "data.batch_prompts=1",
        f"data.train={{name: jsonl, path: {folder}/prompts.jsonl}}",
        "rewards=[{name: exact_match}]", "hardware.name=cpu", f"trainer={{steps: 1, run_dir: {folder / 'run'}}}",
    ]  # fmt: skip
    return load_config(None, [*base, *overrides], get_registry()).run


class Rows(Worker):
    """Handles batches without a model, and fails on demand."""

    @register()
    def hello(self, word: str = "") -> str:
        """Rank and size, and a word."""
        return f"{word}{self.rank}/{self.world_size}"

    @register("dp_compute_proto")
    def double(self, batch: DataProto) -> DataProto:
        """Twice ``x``, and who computed it."""
        rows = len(batch)
        return DataProto.from_dict(
            {"y": batch["x"] * 2, "rank": torch.full((rows,), self.rank), "pid": torch.full((rows,), os.getpid())}
        )

    @register("dp_compute_proto", blocking=False)
    def later(self, batch: DataProto) -> DataProto:
        """As ``double``, without waiting."""
        return self.double(batch)

    @register("dp_compute_proto", blocking=False)
    def plus_one(self, batch: DataProto, more: int = 1) -> DataProto:
        """``y + more`` as ``z``, with who computed ``y``."""
        return DataProto.from_dict(
            {"z": batch["y"] + more, "before": batch["rank"], "here": torch.full((len(batch),), self.rank)}
        )

    @register("dp_compute_metric")
    def total(self, batch: DataProto) -> dict[str, Metric]:
        """Sum of ``x``."""
        return {"x": Sum(batch["x"].sum())}

    @register()
    def pid(self) -> int:
        """Process id."""
        return os.getpid()

    @register()
    def all_reduced(self) -> float:
        """Sum of the ranks."""
        value = torch.tensor(float(self.rank))
        dist.all_reduce(value)
        return float(value)

    @register()
    def sleep(self, seconds: float) -> None:
        """Take long."""
        time.sleep(seconds)

    @register()
    def raise_on(self, rank: int) -> None:
        """Raise on one rank; the others wait for it."""
        print(f"about to fail on {rank}", file=sys.stderr)
        if self.rank == rank:
            raise ValueError(f"rank {rank} is broken")
        dist.barrier()

    @register()
    def die_on(self, rank: int) -> None:
        """Kill one rank; the others wait for it."""
        if self.rank == rank:
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @register()
    def hang_on(self, rank: int) -> None:
        """Hang on one rank; the others return."""
        if self.rank == rank:
            time.sleep(3600)

    @register()
    def unpicklable(self) -> None:
        """Raise something that cannot be sent."""
        raise Unsendable(lambda: None)


class Unsendable(Exception):
    """Holds a function."""

    def __init__(self, held: Any) -> None:
        super().__init__("this stays here")
        self.held = held
