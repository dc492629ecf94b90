"""One GRPO step on one GPU with the rollout `vllm`, beside TRL and beside vLLM's generation alone, in one run.

Qwen2.5-0.5B's shape with random weights, 32 prompts of 100 tokens x 8 completions of exactly 512 tokens, one update a
step, no KL divergence.

    python benchmarks/step_h200.py --folder /tmp/step [--only vllm drivetrain-bf16 ...] [--steps 5]

Every contender is a process of its own, one after the other. Memory is the device's, as its driver counts it. With
`--overrides rollout.sleep_level=0` vLLM's generation alone is timed in drivetrain's process too, after each step, on
the same engine, with and without a seed for each sample: the host's speed differs from minute to minute, and vLLM's
with it.

    vllm            vLLM's offline generation of the same tokens, with log-probs
    drivetrain-bf16 weights in bf16, no recomputation
    drivetrain-fp32 fp32 weights and moments, computed in bf16, layers recomputed
    trl             GRPOTrainer, weights in bf16, no recomputation, generation by transformers
    transformers    `generate` alone
    drivetrain-7b   as drivetrain-fp32 at Qwen2.5-7B's shape; parameters and moments in host memory during generation
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, PROMPT, RESPONSE = 32, 8, 100, 512
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # of vLLM, without compiling its model
ENGINE = {
    "rollout.name": "vllm", "rollout.max_model_tokens": 1024, "rollout.gpu_memory_utilization": 0.4,
    "rollout.max_sequences": PROMPTS * SAMPLES,
}  # fmt: skip
SETTINGS = {
    "drivetrain-bf16": ["model.dtype=bfloat16", "actor.backend.micro_batch_tokens=32768"],
    "drivetrain-fp32": [
        "model.dtype=float32", "actor.backend.compute_dtype=bfloat16", "actor.backend.gradient_checkpointing=true",
        "actor.backend.micro_batch_tokens=32768", "rollout.dtype=bfloat16",
    ],
}  # fmt: skip
SHAPE_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
OFFLOADED = [
    "model.init=pretrained", "actor.backend.param_offload=true", "actor.backend.optimizer_offload=true",
    "rollout.gpu_memory_utilization=0.6", "rollout.sleep_level=2", "actor.backend.micro_batch_tokens=8192",
]  # fmt: skip
ALL = ("vllm", *SETTINGS, "trl", "transformers", "drivetrain-7b")


def main() -> None:
    """Run the contenders and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=ALL, default=ALL[:-1])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny shape and few tokens, to try the script")
    parser.add_argument("--overrides", nargs="*", default=[], help="for drivetrain")
    parser.add_argument("--one", choices=ALL, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        RUN[arguments.one](arguments)
        return
    from grpo_gpu import prepare

    prepare(arguments.folder, arguments.small, PROMPT)
    if "drivetrain-7b" in arguments.only:
        prepare(arguments.folder / "7b", arguments.small, PROMPT, SHAPE_7B)
    found = {name: _measured(name) for name in arguments.only}
    print("\n" + json.dumps(found, indent=1))


def _measured(name: str) -> dict[str, Any]:
    """What a contender's process printed last, and the most memory in use meanwhile."""
    most, over = [0], threading.Event()

    def watch() -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not over.wait(0.3):
            try:
                told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
                most[0] = max(most[0], max(map(int, told.split())))
            except (OSError, subprocess.CalledProcessError, ValueError):
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, *sys.argv, "--one", name], stdout=subprocess.PIPE, text=True)
    over.set()
    watcher.join()
    print(f"--- {name}: {time.perf_counter() - begun:.0f} s with its start\n{done.stdout}", flush=True)
    if done.returncode:
        return {"failed": done.returncode}
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "peak_gib": round(most[0] / 1024, 1)}


def _timed(call: Callable[[], Any], times: int) -> list[float]:
    import torch

    seconds = []
    for _ in range(times):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - begun, 3))
    return seconds


def _prompts(folder: Path, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = (folder / "prompts.jsonl").read_text().splitlines()[:count]
    return [tokenizer(json.loads(row)["prompt"])["input_ids"] for row in rows]


def _sizes(arguments: argparse.Namespace) -> tuple[int, int]:
    return (4, 16) if arguments.small else (PROMPTS, RESPONSE)


def _vllm(arguments: argparse.Namespace) -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM, SamplingParams

    prompts, response = _sizes(arguments)
    on_gpu = arguments.hardware == "cuda"
    how = {"compilation_config": GRAPHS, "gpu_memory_utilization": 0.4} if on_gpu else {
        "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28
    }  # fmt: skip
    engine = LLM(
        model=str(arguments.folder / "model"), load_format="dummy", dtype="bfloat16" if on_gpu else "float32",
        max_model_len=1024, max_num_seqs=prompts * SAMPLES, logprobs_mode="processed_logprobs",
        generation_config="vllm", **how,
    )  # fmt: skip
    sampling = SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=response, logprobs=0, flat_logprobs=True,
                              ignore_eos=True, detokenize=False)  # fmt: skip
    inputs = [{"prompt_token_ids": ids} for ids in _prompts(arguments.folder, prompts)]

    def generate() -> None:
        engine.reset_prefix_cache()
        engine.generate(inputs, sampling, use_tqdm=False)

    first, *seconds = _timed(generate, arguments.steps)
    _tell(seconds, prompts * SAMPLES * response, first_s=first)


def _transformers(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    prompts, response = _sizes(arguments)
    device, dtype = ("cuda", torch.bfloat16) if arguments.hardware == "cuda" else ("cpu", torch.float32)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.folder / "model"), dtype=dtype)
    rows = torch.tensor(_prompts(arguments.folder, prompts), device=device).repeat_interleave(SAMPLES, dim=0)
    ones = torch.ones_like(rows)

    def generate() -> None:
        model.generate(rows, attention_mask=ones, do_sample=True, max_new_tokens=response, min_new_tokens=response,
                       output_logits=False, top_k=0)  # fmt: skip

    first, *seconds = _timed(generate, min(arguments.steps, 3))
    _tell(seconds, prompts * SAMPLES * response, first_s=first)


def _drivetrain(arguments: argparse.Namespace) -> None:
    from drivetrain.cli.main import run

    prompts, response = _sizes(arguments)
    folder, on_gpu = arguments.folder / arguments.one, arguments.hardware == "cuda"
    large = arguments.one == "drivetrain-7b"
    given = arguments.folder / "7b" if large else arguments.folder
    if large:
        _draw(given / "model", on_gpu)
    config = arguments.folder / f"{arguments.one}.yaml"
    config.write_text((given / "run.yaml").read_text().replace("rollout: {name: hf", "rollout: {name: vllm"))
    engine = [f"{key}={value}" for key, value in ENGINE.items()]
    engine += (
        [f"rollout.engine_args.compilation_config.{key}={value}" for key, value in GRAPHS.items()] if on_gpu else []
    )
    kernels = ["actor.backend.attention=varlen", "actor.backend.compile=true"] if on_gpu else []
    settings = SETTINGS["drivetrain-fp32" if large else arguments.one] if on_gpu else []
    settings += OFFLOADED if large else []
    alone: dict[bool, list[float]] = {False: [], True: []}
    if "rollout.sleep_level=0" in arguments.overrides:
        inputs = _prompts(arguments.folder, prompts)

        def both(engine: Any) -> None:
            for seeds, seconds in alone.items():
                seconds += _timed(partial(_alone, engine, inputs, response, seeds), 1)

        _between_steps(both)
    code = run(["train", str(config), "--overwrite", f"hardware.name={arguments.hardware}",
                f"trainer.steps={arguments.steps}", f"trainer.run_dir={folder}", "hybrid_engine.name=colocated",
                "algorithm.old_log_probs=recompute", f"data.batch_prompts={prompts}",
                f"rollout.max_response_tokens={response}", *engine, *kernels, *settings,
                *arguments.overrides])  # fmt: skip
    if code:
        sys.exit(code)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first, *rows = [row for row in map(json.loads, lines) if "time/step_s" in row]
    names = sorted(
        {key for row in rows for key in row if key.startswith(("time/", "sync/", "memory/", "train/rollout_"))}
    )
    medians = {name: float(f"{statistics.median(row.get(name, 0.0) for row in rows):.4g}") for name in names}
    _tell(
        [row["time/step_s"] for row in rows],
        prompts * SAMPLES * response,
        first_s=first["time/step_s"],
        **{f"alone{'_with_seeds' if seeds else ''}": seconds[1:] for seeds, seconds in alone.items() if seconds},
        **medians,
    )


def _between_steps(do: Callable[[Any], None]) -> None:
    """Have something done with vLLM's engine after each step of a run in this process, outside of what is timed."""
    from drivetrain.driver.trainer import Trainer
    from drivetrain_rollout_vllm.engine import VLLMRollout

    engines: list[Any] = []
    initialize, log = VLLMRollout.initialize, Trainer._log

    def kept(self: VLLMRollout) -> None:
        initialize(self)
        engines.append(self._engine)

    def logged(self: Trainer) -> None:
        log(self)
        if self.session.progress.step:
            do(engines[0])

    VLLMRollout.initialize, Trainer._log = kept, logged  # type: ignore[method-assign]


def _alone(engine: Any, inputs: list[list[int]], response: int, seeds: bool) -> None:
    """What `vllm.LLM.generate` does, on an engine that is there; `n` samples take a seed each of one given."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine.reset_prefix_cache()
    for number, ids in enumerate(inputs):
        sampling = SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=response, logprobs=0, flat_logprobs=True,
                                  ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
                                  seed=number * SAMPLES if seeds else None)  # fmt: skip
        engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    while engine.has_unfinished_requests():
        engine.step()


def _draw(folder: Path, on_gpu: bool) -> None:
    """Write random weights in bf16 into a folder that has a config, drawn where that is fast."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda" if on_gpu else "cpu"):
        drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    drawn.save_pretrained(folder)
    del drawn
    if on_gpu:
        torch.cuda.empty_cache()


def _trl(arguments: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    prompts, response = _sizes(arguments)
    on_gpu = arguments.hardware == "cuda"
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.folder / "model"),
                                             dtype=torch.bfloat16 if on_gpu else torch.float32)  # fmt: skip
    texts = [json.loads(row)["prompt"] for row in (arguments.folder / "prompts.jsonl").read_text().splitlines()]
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]

    micro = min(32, prompts * SAMPLES)
    config = GRPOConfig(
        output_dir=str(arguments.folder / "trl"), per_device_train_batch_size=micro,
        gradient_accumulation_steps=prompts * SAMPLES // micro, num_generations=SAMPLES,
        max_completion_length=response, max_steps=min(arguments.steps, 4), learning_rate=1e-6, beta=0.0,
        temperature=1.0, bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=False, save_strategy="no",
        report_to=[], disable_tqdm=True, generation_kwargs={"min_new_tokens": response},
    )  # fmt: skip
    begun = time.perf_counter()
    GRPOTrainer(model=model, reward_funcs=parity, args=config, callbacks=[Clock()],
                processing_class=AutoTokenizer.from_pretrained(arguments.folder / "model", padding_side="left"),
                train_dataset=Dataset.from_dict({"prompt": texts})).train()  # fmt: skip
    first, *seconds = [end - start for start, end in zip([begun, *ends], ends)]
    _tell(seconds, prompts * SAMPLES * response, first_s=first)


def _tell(seconds: list[float], tokens: int, **others: Any) -> None:
    """Print a line of JSON: the median, the single times and tokens a second."""
    median = statistics.median(seconds)
    print(json.dumps({"seconds": round(median, 3), "each": [round(one, 3) for one in seconds],
                      "tokens_per_s": round(tokens / median), **others}))  # fmt: skip


RUN: dict[str, Callable[[argparse.Namespace], None]] = {
    "vllm": _vllm, "trl": _trl, "transformers": _transformers,
    **dict.fromkeys((*SETTINGS, "drivetrain-7b"), _drivetrain),
}  # fmt: skip

if __name__ == "__main__":
    main()
