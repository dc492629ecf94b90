"""Completions of the same prompts before and after training, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain_report.history import History
from drivetrain_report.markup import Html, el, join
from drivetrain_report.numbers import as_float, number

LONGEST = 2000
Row = Mapping[str, Any]


def completions(history: History, limit: int) -> Html | None:
    """The first prompts of the first evaluation with their completions then and at the last one."""
    steps = sorted(step for step, rows in history.samples.items() if rows)
    if not steps or limit == 0:
        return None
    before, after = steps[0], steps[-1]
    first, last = _by_prompt(history.samples[before]), _by_prompt(history.samples[after])
    prompts = [p for p in first if p in last] or list(last)
    shown = prompts[:limit]
    columns = [(after, last)] if before == after or not set(first) & set(last) else [(before, first), (after, last)]
    heads = [el("th", f"{_when(i, len(columns))}, step {step}", scope="col") for i, (step, _) in enumerate(columns)]
    table = el(
        "table",
        el("thead", el("tr", el("th", "Prompt", scope="col"), el("th", "Answer", scope="col"), *heads)),
        el("tbody", *(_row(prompt, columns) for prompt in shown)),
        class_="samples",
    )
    return el("section", el("h2", "Completions"), el("p", _count(prompts, shown, columns), class_="intro"), table)


def _row(prompt: str, columns: Sequence[tuple[int, Mapping[str, Row]]]) -> Html:
    answer = columns[-1][1][prompt].get("answer")
    cells = [
        el("td", _response(rows[prompt]), data_label=f"{_when(i, len(columns))}, step {step}")
        for i, (step, rows) in enumerate(columns)
    ]
    source = columns[-1][1][prompt].get("data_source")
    note = el("span", source, class_="source") if source else None
    return el("tr", el("td", _clip(prompt), note, data_label="Prompt"),
              el("td", _clip(_words(answer)) if answer is not None else "", data_label="Answer"), *cells)  # fmt: skip


def _response(row: Row) -> Html:
    correct, score = row.get("correct"), as_float(row.get("score"))
    marks: list[Html] = []
    if correct is not None:
        marks.append(el("span", "✓ right" if correct else "✗ wrong", class_="right" if correct else "wrong"))
    if row.get("score") is not None and score is not None:
        marks.append(el("span", f"score {number(score)}", class_="score"))
    response = _words(row.get("response"))
    nothing = "only white space" if response else "empty"
    body = _clip(response) if response.strip() else el("div", nothing, class_="empty")
    return join(el("div", *marks, class_="marks") if marks else None, body)


def _clip(words: str) -> Html:
    shown = el("bdi", words[:LONGEST])
    left_out = len(words) - LONGEST
    more = el("span", f" ... {left_out:,} characters more", class_="empty") if left_out > 0 else None
    return el("div", shown, more, class_="words")


def _count(prompts: Sequence[str], shown: Sequence[str], columns: Sequence[tuple[int, Mapping[str, Row]]]) -> str:
    many = f"{len(shown)} of {len(prompts)} prompts" if len(shown) < len(prompts) else f"{len(shown)} prompts"
    if len(prompts) == 1:
        many = "1 prompt"
    rights = [sum(bool(rows[p].get("correct")) for p in shown) for _, rows in columns]
    if not any(rows[p].get("correct") is not None for p in shown for _, rows in columns):
        return f"The first {many} of the evaluation." if len(shown) < len(prompts) else f"{many} of the evaluation."
    if len(rights) == 1:
        return f"{many} of the evaluation, not selected by result; {rights[0]} right."
    return f"{many} of the evaluation, not selected by result; right before: {rights[0]}, after: {rights[1]}."


def _by_prompt(rows: Sequence[Row]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(_words(row.get("prompt")), row)
    return found


def _words(value: Any) -> str:
    """A text, or the turns of a chat."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)) and all(isinstance(m, Mapping) and "content" in m for m in value):
        return "\n\n".join(f"{m.get('role', '')}: {m['content']}" for m in value)
    return str(value)


def _when(column: int, columns: int) -> str:
    return ("Before", "After")[column] if columns == 2 else "Response"
