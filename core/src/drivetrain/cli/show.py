"""``drivetrain config``, ``schema`` and ``plugins``. None of them imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from drivetrain.config.layers import dump_value
from drivetrain.config.models import RunConfig
from drivetrain.config.resolve import load_config
from drivetrain.config.schema import run_schema
from drivetrain.seam.registry import get_registry


def show_config(path: Path, overrides: Sequence[str]) -> None:
    """Print the resolved config as YAML with the origin of each value as a comment."""
    resolved = load_config(path, overrides, get_registry())
    for note in resolved.notes:
        print(f"# {note}")
    lines: list[tuple[str, str]] = []

    def walk(value: Any, key: str, indent: str, lead: str) -> None:
        name = key.rpartition(".")[2]
        if isinstance(value, BaseModel):
            value = {field: getattr(value, field) for field in type(value).model_fields}
        if isinstance(value, Mapping) and value:
            if lead:
                lines.append((f"{indent}{lead}", ""))
            for inner, item in value.items():
                walk(item, f"{key}.{inner}".lstrip("."), indent + ("  " if lead else ""), f"{dump_value(inner)}:")
        elif isinstance(value, (list, tuple)) and any(isinstance(v, BaseModel) for v in value):
            lines.append((f"{indent}{lead}", ""))
            for index, item in enumerate(value):
                walk(item, f"{key}.{index}", indent + "  ", "-")
        else:
            lines.append((f"{indent}{dump_value(name)}: {dump_value(value)}", resolved.origin(key)))

    walk(resolved.run, "", "", "")
    width = max(len(left) for left, right in lines if right)
    for left, right in lines:
        print(f"{left:<{width}}  # {right}" if right else left)


def show_schema(out: Path | None) -> None:
    """Print the JSON schema, or write it."""
    text = json.dumps(run_schema(RunConfig, get_registry()), indent=2) + "\n"
    if out is None:
        print(text, end="")
        return
    aside = out.with_name(f".{out.name}.part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(out)
    print(f"wrote {out}")


def show_plugins(*, as_json: bool) -> None:
    """Print one row an offer or failure."""
    rows = get_registry().rows()
    if as_json:
        print(json.dumps([vars(row) for row in rows], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("kind", "name", "distribution", "version", "status", "summary"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        style = "" if row.status == "ok" else "red" if row.status != "disabled" else "dim"
        table.add_row(row.kind or "-", row.name, row.distribution, row.version, row.status,
                      row.summary if row.status == "ok" else row.reason, style=style)  # fmt: skip
    Console(width=None if Console().is_terminal else 200, highlight=False, markup=False).print(table)
