"""The pairs that examples/algorithms/dpo.yaml learns from."""

from __future__ import annotations

import json
from pathlib import Path

from drivetrain import resolve
from drivetrain.config.resolve import load_config
from drivetrain.seam.registry import get_registry

FOLDER = Path(__file__).parent.parent / "examples" / "algorithms"


def test_pairs_are_right_and_wrong_and_none_has_a_prompt_of_the_test() -> None:
    pairs = [json.loads(line) for line in (FOLDER / "preferences.jsonl").read_text().splitlines()]
    section = load_config(FOLDER / "dpo.yaml", [], get_registry()).run.data.eval
    held_out = {example.prompt for example in resolve("datasets", section.name)(section)}
    prompts = {pair["prompt"] for pair in pairs}
    assert len(prompts) == len(pairs) == 3072 and len(held_out) > 500
    assert not prompts & held_out
    for pair in pairs:
        left, sign, right = pair["prompt"][:2], pair["prompt"][2], pair["prompt"][3:5]
        answer = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert pair["chosen"] == str(answer) != pair["rejected"]
