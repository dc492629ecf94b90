"""Seconds of a GRPO step on one GPU or several, by phase: Qwen2.5-0.5B's shape with random weights.

32 prompts of 100 tokens x 8 completions of exactly 512 tokens, one update a step, no KL, log-probs of the rollout
as old log-probs. Two settings: bf16 weights without recomputation, and fp32 weights computed in bf16 with it.

    python benchmarks/grpo_gpu.py --folder /tmp/grpo-gpu [--hardware cuda] [--steps 5] [--processes 2]

With several processes (executor ray, one device each) every one has all weights for its rollout, sent from the shards
after each update.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

from drivetrain.cli.main import run

SHAPE = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                 "vocab_size": 512}  # fmt: skip
REWARD = '''
def score(response_token_ids: list) -> float:
    """Something that differs between completions; what it is does not matter for the time."""
    return sum(token % 2 for token in response_token_ids) / len(response_token_ids)
'''
SETTINGS = {
    "bf16 weights": ["model.dtype=bfloat16"],
    "fp32 weights, bf16 compute, recomputation": [
        "model.dtype=float32", "actor.backend.compute_dtype=bfloat16", "actor.backend.gradient_checkpointing=true",
    ],
}  # fmt: skip


def prepare(folder: Path, small: bool, prompt_tokens: int, shape: dict[str, Any] = SHAPE) -> Path:
    """Write the model's config, a tokenizer of digits, prompts, a reward and the run's config."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special).save_pretrained(model)
    config = Qwen2Config(**(SMALL if small else shape), pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(model)
    draw = random.Random(0)
    prompts = ["".join(draw.choices("0123456789", k=prompt_tokens)) for _ in range(512)]
    rows = (json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts)
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "reward.py").write_text(REWARD)
    path = folder / "run.yaml"
    path.write_text(f"""
model: {{path: {model}, init: random}}
algorithm: {{name: grpo, group_size: 8, old_log_probs: rollout}}
actor: {{backend: {{name: fsdp}}, optimizer: {{name: adamw, lr: 1.0e-6}}}}
rollout: {{name: hf, max_response_tokens: 512, ignore_eos: true}}
data: {{batch_prompts: 32, train: {{name: jsonl, path: {folder / "prompts.jsonl"}}}}}
rewards: [{{name: function, path: "{folder / "reward.py"}:score"}}]
trackers: [{{name: jsonl}}, {{name: lines}}]
trainer: {{steps: 5}}
""")
    return path


def main() -> None:
    """Run the settings one after the other and print medians over all steps but the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--hardware", default="cuda")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    path = prepare(arguments.folder, arguments.small, prompt_tokens=100)
    where = ["hybrid_engine.name=colocated"]
    if arguments.processes > 1:
        where += ["executor.name=ray", f"executor.processes={arguments.processes}"]
    for number, (title, overrides) in enumerate(SETTINGS.items()):
        run_dir = arguments.folder / f"run-{number}"
        code = run(["train", str(path), "--overwrite", f"hardware.name={arguments.hardware}",
                    f"trainer.steps={arguments.steps}", f"trainer.run_dir={run_dir}",
                    f"rollout.max_response_tokens={arguments.response_tokens}",
                    f"rollout.min_response_tokens={arguments.response_tokens}",
                    *where, *overrides, *arguments.overrides])  # fmt: skip
        if code:
            print(f"{title}: failed with exit code {code}")
            continue
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        first, *rows = [row for row in map(json.loads, lines) if "time/step_s" in row]
        print(f"\n{title}: median seconds of a step after the first, which took {first['time/step_s']:.2f}")
        for name in sorted({key for row in rows for key in row if key.startswith(("time/", "sync/", "transfer/"))}):
            print(f"  {name:<20} {statistics.median(row.get(name, 0.0) for row in rows):16,.3f}")
        rate = statistics.median(row["throughput/tokens_per_s"] for row in rows)
        print(f"  completion tokens a second {rate:,.0f}\n", flush=True)


if __name__ == "__main__":
    main()
