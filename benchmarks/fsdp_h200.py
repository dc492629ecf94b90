"""Log-probs and updates of the backend fsdp on one GPU, beside the same work in plain transformers.

    python benchmarks/fsdp_h200.py [--shapes 0.5b 1.5b 7b] [--budget 8192] [--recompute 7b]
        [--attention varlen] [--checkpointing selective] [--compile] [--engines drivetrain]

Qwen2.5's shapes with random weights in bf16. A step has 32,768 tokens: rows of a prompt of 64 to 512 tokens and a reply
whose length is drawn log-uniformly from 64 to 4,096, until the tokens are used up. The loss is clip on the replies.

drivetrain packs rows without padding; plain transformers runs them sorted by length, padded, in micro-batches of the
same number of tokens, with SDPA, and takes log-probs from the whole logits of a micro-batch in float32. Model FLOPs are
2 a weight and token in the layers, 2 a weight of the head and response token, and those of causal attention within each
row; three times that for an update, recomputation not counted. MFU is these over seconds of forward and backward and
989e12. The optimizer's step is reported apart.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from drivetrain import BackendContext, DataProto, LossTerm, resolve
from drivetrain.config import ModelConfig, PluginConfig
from drivetrain.numerics import Counts, LossInputs
from drivetrain.numerics import clip as clip_loss

PEAK_FLOPS = 989e12  # bf16, dense, of an H100 or H200
VOCABULARY = 151936
SHAPES = {
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
KV_HEADS = {"7b": 4}
TIED = {"7b": False}


def write_folder(shape: str, folder: Path) -> Qwen2Config:
    """A folder with the shape's config and a tokenizer, without weights."""
    config = Qwen2Config(
        **SHAPES[shape], vocab_size=512 if shape == "small" else VOCABULARY, max_position_embeddings=8192,
        num_key_value_heads=KV_HEADS.get(shape, 2), tie_word_embeddings=TIED.get(shape, True), pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return config


def workload(tokens: int, vocabulary: int, longest: int) -> tuple[DataProto, list[tuple[int, int]]]:
    """A batch, and the lengths of each row's prompt and response."""
    draw, lengths, left = random.Random(0), list[tuple[int, int]](), tokens
    while left > 128:
        prompt = min(draw.randint(64, 512), left // 2)
        response = min(round(math.exp(draw.uniform(math.log(64), math.log(longest)))), left - prompt)
        lengths.append((prompt, response))
        left -= prompt + response
    prompts, responses = (max(row[side] for row in lengths) for side in (0, 1))
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(len(lengths), prompts + responses, dtype=torch.long)
    real = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(lengths):
        span = slice(prompts - prompt, prompts + response)
        ids[row, span] = torch.randint(3, vocabulary, (prompt + response,), generator=generator)
        real[row, span] = 1
    mask = real[:, prompts:].clone()
    zeros = torch.zeros(mask.shape)
    columns = {"advantages": torch.randn(len(lengths), 1, generator=generator).expand(mask.shape).contiguous()}
    columns |= {"old_log_probs": zeros - math.log(vocabulary)}
    batch = {"input_ids": ids, "attention_mask": real, "responses": ids[:, prompts:].clone(), "response_mask": mask}
    return DataProto.from_single_dict({**batch, **columns, "uid": [str(n) for n in range(len(lengths))]}), lengths


def flops(config: Qwen2Config, lengths: list[tuple[int, int]]) -> float:
    """Of a forward pass."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    head_dim = hidden // config.num_attention_heads
    matrices = 2 * hidden * hidden + 2 * hidden * head_dim * config.num_key_value_heads + 3 * hidden * inner
    tokens = sum(prompt + response for prompt, response in lengths)
    attention = sum(2 * (prompt + response) ** 2 * hidden for prompt, response in lengths)
    head = 2 * sum(response for _, response in lengths) * hidden * config.vocab_size
    return layers * (2 * tokens * matrices + attention) + head


class Ours:
    """The backend fsdp."""

    def __init__(self, folder: Path, hardware: Any, budget: int, recompute: bool, lr: float, **options: Any) -> None:
        chosen = options.pop("checkpointing")
        options |= {"name": "fsdp", "gradient_checkpointing": chosen if recompute else False}
        from drivetrain_backend_fsdp.config import AdamWConfig, FSDPConfig

        context = BackendContext(
            role="actor", model=ModelConfig(path=folder, dtype="bfloat16", init="random"),
            optimizer=AdamWConfig(lr=lr), max_grad_norm=1.0, hardware=hardware, rank=0, world_size=1, seed=0,
        )  # fmt: skip
        self.made = resolve("backends", "fsdp")(FSDPConfig(**options, micro_batch_tokens=budget), context)
        with torch.device(hardware.device()):  # weights are drawn where they are needed
            self.made.initialize()

    def log_probs(self, batch: DataProto) -> None:
        self.made.forward(batch, ("log_probs",), temperature=1.0)

    def update(self, batch: DataProto) -> None:
        counts = Counts.of(batch["response_mask"])
        self.made.update(batch, (LossTerm("clip"),), counts, temperature=1.0, lr_factor=1.0)

    @property
    def optimizer(self) -> Any:
        return self.made.optimizer


class Plain:
    """transformers by itself."""

    def __init__(self, folder: Path, hardware: Any, budget: int, recompute: bool, lr: float, **_: Any) -> None:
        self.device, self.budget = hardware.device(), budget
        with torch.device(self.device):
            self.model = AutoModelForCausalLM.from_config(
                Qwen2Config.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        self.model.train()
        if recompute:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=self.device.type == "cuda")

    def _micro_batches(self, batch: DataProto) -> list[list[int]]:
        lengths = batch["attention_mask"].sum(1).tolist()
        plan: list[list[int]] = []
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if plan and lengths[plan[-1][0]] * (len(plan[-1]) + 1) <= self.budget:
                plan[-1].append(row)
            else:
                plan.append([row])
        return plan

    def _log_probs(self, batch: DataProto, rows: list[int]) -> tuple[Tensor, DataProto]:
        part = batch[rows]
        width = part["response_mask"].shape[1]
        real = part["attention_mask"]
        first, last = int(real.argmax(1).min()), width - int(part["response_mask"].sum(1).max())
        ids, real = (x[:, first : x.shape[1] - last].to(self.device) for x in (part["input_ids"], real))
        keep = width - last
        logits = self.model(
            input_ids=ids, attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0), use_cache=False,
            logits_to_keep=keep + 1,
        ).logits[:, :-1]  # fmt: skip
        log_p = logits.float().log_softmax(-1)
        return log_p.gather(2, ids[:, -keep:, None])[..., 0], part

    @torch.no_grad()
    def log_probs(self, batch: DataProto) -> None:
        for rows in self._micro_batches(batch):
            self._log_probs(batch, rows)

    def update(self, batch: DataProto) -> None:
        counts = Counts.of(batch["response_mask"])
        for rows in self._micro_batches(batch):
            log_probs, part = self._log_probs(batch, rows)
            names = ("response_mask", "advantages", "old_log_probs")
            columns = {name: part[name][:, : log_probs.shape[1]].to(self.device) for name in names}
            clip_loss(LossInputs(log_probs=log_probs), columns, counts).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


ENGINES: dict[str, Any] = {"drivetrain": Ours, "transformers": Plain}


def measure(hardware: Any, work: Callable[[], None], optimizer: Any, repeats: int) -> tuple[float, float, int]:
    """Median seconds without and of the optimizer's step, and peak bytes."""
    spent: list[float] = []
    step = optimizer.step

    def timed(*args: Any, **kwargs: Any) -> Any:
        hardware.synchronize()
        start = time.perf_counter()
        result = step(*args, **kwargs)
        hardware.synchronize()
        spent.append(time.perf_counter() - start)
        return result

    optimizer.step = timed
    work()
    hardware.reset_peak()
    rest, steps = [], []
    for _ in range(repeats):
        spent.clear()
        hardware.synchronize()
        start = time.perf_counter()
        work()
        hardware.synchronize()
        rest.append(time.perf_counter() - start - sum(spent))
        steps.append(sum(spent))
    optimizer.step = step
    return statistics.median(rest), statistics.median(steps), hardware.memory().peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5b", "1.5b", "7b"])
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--recompute", nargs="*", default=[], help="shapes whose layers are computed again")
    parser.add_argument("--attention", default="sdpa", help="kernel of drivetrain's attention")
    parser.add_argument("--checkpointing", default="full", choices=["full", "selective"],
                        help="what drivetrain does for the shapes of --recompute")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="compile drivetrain's layers")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    given = parser.parse_args()
    options = {name: getattr(given, name) for name in ("attention", "checkpointing", "compile")}
    hardware = resolve("hardware", given.hardware)(PluginConfig(name=given.hardware))
    print("\n".join(machine.head("Backend fsdp on one device", {
        "device": hardware.device_name(), "versions": machine.versions("torch", "transformers"),
        "options": ", ".join(f"{name} {value}" for name, value in options.items()),
    }, [])))  # fmt: skip
    titles = ["shape", "engine", "log-probs tokens/s", "MFU", "peak GiB", "update tokens/s", "MFU", "optimizer s",
              "peak GiB"]  # fmt: skip
    print("\n" + "\n".join(machine.table(titles, [])), flush=True)
    for shape in given.shapes:
        with tempfile.TemporaryDirectory() as folder:
            config = write_folder(shape, Path(folder))
            batch, lengths = workload(given.tokens, config.vocab_size, given.longest)
            whole, tokens = flops(config, lengths), sum(map(sum, lengths))
            for engine in given.engines:
                try:
                    again = shape in given.recompute
                    made: Any = ENGINES[engine](Path(folder), hardware, given.budget, again, 1e-6, **options)
                    made.log_probs(batch)
                    forward, update = (
                        measure(hardware, functools.partial(work, batch), made.optimizer, given.repeats)
                        for work in (made.log_probs, made.update)
                    )
                except torch.OutOfMemoryError as error:
                    print(f"| {shape} | {engine} | {str(error).splitlines()[0]} |", flush=True)
                else:
                    cells = [shape, engine]
                    cells += [f"{tokens / forward[0]:,.0f}", f"{whole / forward[0] / PEAK_FLOPS:.1%}",
                              f"{forward[2] / 2**30:.1f}"]  # fmt: skip
                    cells += [f"{tokens / update[0]:,.0f}", f"{3 * whole / update[0] / PEAK_FLOPS:.1%}",
                              f"{update[1]:.3f}", f"{update[2] / 2**30:.1f}"]  # fmt: skip
                    print(f"| {' | '.join(cells)} |", flush=True)
                made = None
                gc.collect()
                hardware.empty_cache()
    print(f"\n{len(lengths)} rows, {tokens:,} tokens, the longest {max(map(sum, lengths)):,}.")


if __name__ == "__main__":
    main()
