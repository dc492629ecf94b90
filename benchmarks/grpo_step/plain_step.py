"""The step in plain PyTorch: ``model.generate``, and an update over padded micro-batches."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_step import workload as work


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=work.LEARNING_RATE, fused=True)
    sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
                                max_new_tokens=work.RESPONSE_TOKENS)  # fmt: skip
    encoded = tokenizer(work.prompts(folder), return_tensors="pt", add_special_tokens=False)["input_ids"]
    prompts = encoded.repeat_interleave(work.SAMPLES, dim=0)
    watch = work.Stopwatch()
    line = work.Line(torch=torch.__version__, transformers=transformers.__version__)
    while line.wait():
        with watch("step"):
            with watch("generation"), torch.no_grad():
                tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=sampling)
            texts = tokenizer.batch_decode(tokens[:, -work.RESPONSE_TOKENS :], skip_special_tokens=True)
            scores = torch.tensor([work.digit_share(text) for text in texts]).view(work.PROMPTS, work.SAMPLES)
            spread = scores.std(dim=1, keepdim=True) + 1e-6
            advantages = ((scores - scores.mean(dim=1, keepdim=True)) / spread).flatten()
            with watch("training"):
                update(model, optimizer, tokens, advantages)
        assert tokens.shape[1] == work.PROMPT_TOKENS + work.RESPONSE_TOKENS
        line.answer(watch.take())


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, advantages: torch.Tensor
) -> None:
    """One optimizer step on the clipped objective; with one update, the old log-probs are the present ones."""
    optimizer.zero_grad()
    for start in range(0, len(tokens), work.MICRO_BATCH_ROWS):
        rows = tokens[start : start + work.MICRO_BATCH_ROWS]
        advantage = advantages[start : start + work.MICRO_BATCH_ROWS, None]
        responses = rows[:, -work.RESPONSE_TOKENS :]
        output = model(rows, attention_mask=torch.ones_like(rows), logits_to_keep=work.RESPONSE_TOKENS + 1)
        logits = output.logits[:, :-1]
        losses = cross_entropy(logits.flatten(0, 1), responses.flatten(), reduction="none")
        log_probs = -losses.view(responses.shape)
        ratio = (log_probs - log_probs.detach()).exp()
        objective = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        (-objective.sum() / (len(tokens) * work.RESPONSE_TOKENS)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
