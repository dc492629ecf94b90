"""Time of this engine divided by the time of transformers' ``generate`` for the same work, on one CPU thread.

Both draw the same number of tokens for the same prompts with the same weights, in turns, so that a busy machine slows
both alike; the median of the ratios is printed. Run::

    python benchmarks/generate_cpu.py [rounds]
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from drivetrain import GenerationRequest, ModelConfig, RolloutContext, SamplingParams
from drivetrain_rollout_hf.config import HFRolloutConfig
from drivetrain_rollout_hf.engine import HFRollout

PROMPTS, SAMPLES = 32, 8


def engine_for(model: PreTrainedModel) -> HFRollout:
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        hardware: Any = None  # the module is attached; no device is asked for
        context = RolloutContext(model=ModelConfig(path=Path(folder)), hardware=hardware, rank=0, world_size=1, seed=0)
        engine = HFRollout(HFRolloutConfig(name="hf", max_response_tokens=64), context)
        engine.initialize()
    engine.attach(model)
    return engine


def compare(model: PreTrainedModel, lengths: list[int], tokens: int, rounds: int, **options: Any) -> float:
    """Median of (engine's seconds / generate's seconds)."""
    vocabulary = model.config.vocab_size
    prompts = [[random.randrange(4, min(90, vocabulary)) for _ in range(length)] for length in lengths]
    longest = max(lengths)
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]).repeat_interleave(SAMPLES, 0)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths]).repeat_interleave(SAMPLES, 0)
    warpers = {"top_k": 0, "temperature": 1.0, **options}
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **options)
    engine = engine_for(model)

    def theirs() -> None:
        with torch.no_grad():
            model.generate(
                padded, attention_mask=mask, do_sample=True, min_new_tokens=tokens, max_new_tokens=tokens,
                pad_token_id=0, **warpers,
            )  # fmt: skip

    def ours() -> None:
        engine.generate_batch(
            [
                GenerationRequest(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling,
                                  seeds=tuple(range(number * SAMPLES, (number + 1) * SAMPLES)))
                for number, prompt in enumerate(prompts)
            ]
        )  # fmt: skip

    def seconds(work: Callable[[], None]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    theirs(), ours()
    return statistics.median(seconds(ours) / seconds(theirs) for _ in range(rounds))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "intermediate_size": 512}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    qwen = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=4096, num_hidden_layers=2, max_position_embeddings=1024, tie_word_embeddings=True,
                    **heads, **ids)
    ).eval()  # fmt: skip
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_hidden_layers=4, max_position_embeddings=64, **heads, **ids)
    ).eval()
    same, ragged = [16] * PROMPTS, [random.randint(5, 9) for _ in range(PROMPTS)]
    print("engine / generate, 32 prompts x 8 samples; below 1 the engine is faster")
    print(f"2 layers, 4096 tokens, prompt 16, response 64        {compare(qwen, same, 64, rounds):.2f}")
    print(f"  with top_k=50, top_p=0.9                           "
          f"{compare(qwen, same, 64, max(1, rounds // 2), top_k=50, top_p=0.9):.2f}")  # fmt: skip
    print(f"4 layers, 64 tokens, prompt 5 to 9, response 5       {compare(llama, ragged, 5, rounds * 4):.2f}")


if __name__ == "__main__":
    main()
