"""The step as TRL's GRPOTrainer takes it. Runs in a Python of its own, which has trl, and not drivetrain."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_step import workload as work


def digit_shares(completions: list[str], **_: Any) -> list[float]:
    return [work.digit_share(text) for text in completions]


class InTurn(TrainerCallback):
    """Begins a step when it is asked for. Training is the step without generation and scoring."""

    def __init__(self, watch: work.Stopwatch, line: work.Line) -> None:
        self._watch, self._line = watch, line

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._line.wait():
            sys.exit()
        self._step = self._watch("step")
        self._step.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step.__exit__(None, None, None)
        seconds = self._watch.take()
        collected = seconds.pop("collect")
        seconds["training"] = [whole - part for whole, part in zip(seconds["step"], collected, strict=True)]
        self._line.answer(seconds)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    watch = work.Stopwatch()

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with watch("generation"):
                return super()._generate(*args, **kwargs)

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            with watch("collect"):
                return super()._generate_and_score_completions(*args, **kwargs)

    rows = work.PROMPTS * work.SAMPLES
    config = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=work.MICRO_BATCH_ROWS,
        gradient_accumulation_steps=rows // work.MICRO_BATCH_ROWS, num_generations=work.SAMPLES,
        max_completion_length=work.RESPONSE_TOKENS, max_steps=1_000_000, learning_rate=work.LEARNING_RATE,
        lr_scheduler_type="constant", beta=0.0, num_iterations=1, temperature=1.0, bf16=False, use_cpu=True,
        gradient_checkpointing=False, dataloader_pin_memory=False, save_strategy="no", report_to=[],
        disable_tqdm=True, generation_kwargs={"min_new_tokens": work.RESPONSE_TOKENS},
    )  # fmt: skip
    line = work.Line(trl=trl.__version__, torch=torch.__version__, transformers=transformers.__version__)
    Timed(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=digit_shares, args=config, callbacks=[InTurn(watch, line)],
        train_dataset=Dataset.from_dict({"prompt": work.prompts(folder)}),
    ).train()  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
