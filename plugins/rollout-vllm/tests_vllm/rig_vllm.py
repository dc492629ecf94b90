"""Tiny models with random weights, engines of vLLM's that serve them, and what transformers says of their tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from drivetrain import Completion, GenerationRequest, ModelConfig, PluginConfig, RolloutContext, SamplingParams, resolve
from drivetrain.weights import lend

transformers.logging.set_verbosity_error()

EOS = 1
VOCABULARY = 128
ATOL = 5e-5
"""By how much log-probs in float32 may be off."""
TEXTS = ["<pad>", "<eos>", "<bos>", *(chr(code) for code in range(33, 127)),
         *(f"{first}{second}" for first in "abcdef" for second in "xyzuv"), "."]  # fmt: skip
FAMILIES = ("qwen2", "llama")
"""The first has tied embeddings."""


def write_model(folder: Path, family: str) -> Path:
    """A model whose distributions are far from uniform, and a tokenizer in which some tokens are two characters."""
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1 if family == "qwen2" else 2, "max_position_embeddings": 512,
        "bos_token_id": 2, "eos_token_id": EOS, "pad_token_id": 0, "tie_word_embeddings": family == "qwen2",
        "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(3)
    module = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[family](**shape))
    module.save_pretrained(folder)
    bare = Tokenizer(models.WordLevel({text: at for at, text in enumerate(dict.fromkeys(TEXTS))}, unk_token="<pad>"))
    bare.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(folder)
    return folder


def changed(folder: Path, seed: int) -> Any:
    """The folder's model with every weight moved, by random numbers of that seed; 0 moves none."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1 * (seed > 0))
    return model


Sent = list[tuple[str, torch.Tensor, str | None]]


def weights_of(model: Any) -> Sent:
    """What a trainer lends: each tensor once, a tied one as an alias."""
    embedding = "model.embed_tokens.weight"
    tied = {"lm_head.weight": embedding} if model.config.tie_word_embeddings else {}
    return [(name, tensor, tied.get(name)) for name, tensor in model.state_dict().items()]


def context_of(folder: Path, *, rank: int = 0, world_size: int = 1, receives_weights: bool = True) -> RolloutContext:
    hardware = resolve("hardware", "cpu")(PluginConfig(name="cpu"))
    return RolloutContext(model=ModelConfig(path=folder), hardware=hardware, rank=rank, world_size=world_size, seed=5,
                          receives_weights=receives_weights)  # fmt: skip


def make_engine(
    folder: Path, *, rank: int = 0, world_size: int = 1, receives_weights: bool = True, **settings: Any
) -> Any:
    """An engine that has started."""
    from drivetrain_rollout_vllm.config import VLLMRolloutConfig

    config = VLLMRolloutConfig(name="vllm", max_response_tokens=24, kv_cache_bytes=32 << 20, **settings)
    context = context_of(folder, rank=rank, world_size=world_size, receives_weights=receives_weights)
    engine = resolve("rollouts", "vllm")(config, context)
    engine.initialize()
    return engine


class Served:
    """An engine, and the model of transformers' whose weights it has."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.engine = make_engine(folder, **settings)
        self.model: Any = None
        self._kept: dict[int, Any] = {}

    @property
    def module(self) -> torch.nn.Module:
        """vLLM's own."""
        worker = self.engine._engine.model_executor.driver_worker.worker
        module: torch.nn.Module = worker.model_runner.model
        return module

    def variant(self, seed: int) -> Any:
        if seed not in self._kept:
            self._kept[seed] = changed(self.folder, seed)
        return self._kept[seed]

    def load(self, seed: int, version: int = 1) -> Any:
        """Have the engine take in the weights of a variant, in several buckets."""
        self.model = self.variant(seed)
        self.send(weights_of(self.model), version)
        return self.model

    def send(self, sent: Sent, version: int) -> None:
        with lend(sent, bucket_bytes=30_000, version=version) as stream:
            self.engine.load_weights(stream, version)

    def draw(self, prompt: Sequence[int], name: str = "r", seeds: Iterable[int] = (0,), **sampling: Any) -> Any:
        """The samples of one request."""
        (completions,) = self.engine.generate_batch([request(prompt, name, seeds, **sampling)])
        return completions

    @contextmanager
    def tokens_read(self) -> Iterator[list[int]]:
        """How many tokens each forward call of vLLM's is given, padding included."""
        seen: list[int] = []

        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            seen.append(len(ids))

        hook = self.module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield seen
        finally:
            hook.remove()


def request(prompt: Sequence[int], name: str = "r", seeds: Iterable[int] = (0,), **sampling: Any) -> GenerationRequest:
    """A request, by default of one sample."""
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), seeds=tuple(seeds),
                             sampling=SamplingParams(**sampling))  # fmt: skip


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 12 tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (count,), generator=draw).tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]


def plain_distribution(logits: torch.Tensor, params: SamplingParams, drawn: int) -> torch.Tensor:
    """Of one token, as plainly as can be: temperature, then min-p, top-k and top-p; float64 (vocabulary,)."""
    logits = logits.double().clone()
    if drawn + 1 < params.min_tokens:
        logits[EOS] = -torch.inf
    if params.temperature == 0:
        return logits.softmax(-1)
    weights = (logits / params.temperature).softmax(-1)
    weights[weights < params.min_p * weights.max()] = 0
    order = weights.argsort(descending=True)
    if params.top_k:
        weights[order[params.top_k :]] = 0
    weights = weights / weights.sum()
    reached = 0.0
    for token in order.tolist():
        if reached >= params.top_p:
            weights[token] = 0
        reached += float(weights[token])
    return weights / weights.sum()


def plain_log_probs(model: Any, asked: GenerationRequest, got: Completion) -> list[float]:
    """What transformers says of a completion's tokens."""
    prompt, tokens = list(asked.prompt_token_ids), list(got.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return [
        float(plain_distribution(row, asked.sampling, drawn)[token].log())
        for drawn, (row, token) in enumerate(zip(logits, tokens, strict=True))
    ]


def furthest(model: Any, asked: Sequence[GenerationRequest], got: Sequence[Sequence[Completion]]) -> float:
    """The largest difference of a log-prob from transformers'."""
    return max(
        abs(ours - theirs)
        for one, completions in zip(asked, got, strict=True)
        for completion in completions
        for ours, theirs in zip(completion.log_probs, plain_log_probs(model, one, completion), strict=True)
    )


def greedy(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """transformers' own ``generate``."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                         pad_token_id=0, eos_token_id=EOS)  # fmt: skip
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


MAIN = [sys.executable, "-c", "from drivetrain.cli.main import main; main()"]


def environment(**more: str) -> dict[str, str]:
    """Of a run in a process of its own."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("DRIVETRAIN_", "RAY_", "VLLM_"))}
    return {**own, "OMP_NUM_THREADS": "1", **more}


def train(folder: Path, *words: object, code: int = 0) -> tuple[list[dict[str, float]], str]:
    """Run ``drivetrain train``; returns the metrics of its steps, and what it wrote."""
    command = [*MAIN, "train", *map(str, words), f"trainer.run_dir={folder}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return rows, done.stdout + done.stderr
