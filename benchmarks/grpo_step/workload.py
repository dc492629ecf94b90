"""The work that every contender does, and how a contender talks to the program that times it.

A contender is a process of its own. It says what it is, then takes one step for each line that it reads, and answers
with the seconds of the step's phases; while one works the others wait. TRL has a Python of its own, so nothing here
imports drivetrain.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES = 32, 8
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 64
LAYERS, HIDDEN, HEADS, KEY_HEADS, VOCABULARY = 2, 128, 4, 2, 4096
MICRO_BATCH_ROWS = 32
"""Rows of a padded micro-batch, of the contenders that pad."""
LEARNING_RATE = 1e-4

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


def write(folder: Path) -> None:
    """Write ``model`` (random weights and a tokenizer) and ``prompts.jsonl``."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = [*SPECIAL.values(), *map(chr, range(32, 127))]
    words += [f"word{index}" for index in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **SPECIAL).save_pretrained(
        folder / "model"
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=1024, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = [{"prompt": "".join(draw.choices("abcdefghij0123456789+-", k=PROMPT_TOKENS))} for _ in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts(folder: Path) -> list[str]:
    """The prompts that :func:`write` wrote."""
    return [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]


def digit_share(response: str) -> float:
    """The reward: how much of the text is digits."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


class Stopwatch:
    """Seconds by phase, on the wall and of this process's CPU time."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            total = self._seconds[phase]
            total[0] += time.perf_counter() - wall
            total[1] += time.process_time() - cpu

    def take(self) -> dict[str, list[float]]:
        """``{phase: [wall, cpu]}`` since the last call."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


class Line:
    """A contender's line to the program that times it. Whatever else is printed goes to standard error."""

    def __init__(self, **versions: str) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._say({"python": sys.version.split()[0], **versions})

    def wait(self) -> bool:
        """Wait until a step is asked for; False when no more is wanted."""
        return sys.stdin.readline() == "step\n"

    def answer(self, seconds: dict[str, list[float]]) -> None:
        """Tell the seconds of a step: ``step``, ``generation`` and ``training``."""
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._say({"seconds": seconds, "peak_mib": peak_mib})

    def _say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()
