"""Writes preferences.jsonl: sums with their answers, and wrong answers that the warm start drew.

python examples/algorithms/make_preferences.py

The same file each time. No prompt of the 512 that the examples are tested on is in it.
"""

from __future__ import annotations

import json
from pathlib import Path

from drivetrain.config.resolve import load_config
from drivetrain.driver.session import Session
from drivetrain.seam.registry import get_registry

HERE = Path(__file__).parent
PAIRS = 3072
OVERRIDES = ["data.train.size=6000", "data.train.seed=20000000", "data.batch_prompts=512", "executor.name=local",
             "hybrid_engine.name=shared", "hardware.name=cpu"]  # fmt: skip


def main() -> None:
    run = load_config(HERE.parent / "quickstart" / "grpo.yaml", OVERRIDES, get_registry()).run
    pairs: dict[str, dict[str, str]] = {}
    with Session(run) as session:
        assert session.train_prompts is not None
        while len(pairs) < PAIRS:
            prompts = session.train_prompts.next_batch(run.data.batch_prompts)
            drawn = session.roles.rewards.score(session.roles.rollout.generate(prompts))
            texts = session.tokenizer.batch_decode(drawn["responses"], skip_special_tokens=True)
            for prompt, answer, text, score in zip(drawn["raw_prompt"], drawn["answer"], texts, drawn["scores"]):
                if score == 0 and text != answer and len(pairs) < PAIRS:
                    pairs.setdefault(prompt, {"prompt": prompt, "chosen": answer, "rejected": text})
    lines = (json.dumps(pair) + "\n" for pair in pairs.values())
    (HERE / "preferences.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
