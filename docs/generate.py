"""Writes the pages of docs/reference that follow from the code: hooks, config, columns, plugins.

python docs/generate.py            writes them
python docs/generate.py --check    exits with 1 if a page is not what the code says
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drivetrain.config.layers import DEFAULTS, dump_value
from drivetrain.config.models import Offered, RunConfig
from drivetrain.config.sections import types_inside
from drivetrain.contracts import observers
from drivetrain.protocol import columns, columns_markdown
from drivetrain.seam import hookspecs
from drivetrain.seam.registry import Row, get_registry
from drivetrain.seam.specs import SPEC_TYPES, PluginSpec

ROOT = Path(__file__).resolve().parent.parent
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if hasattr(hook, "drivetrain_spec")}
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "length >=", "max_length": "length <="}
Cells = tuple[str, ...]


def table(head: str, rows: list[Cells]) -> str:
    lines = [tuple(head.split(", ")), ("---",) * len(head.split(", ")), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines) + "\n"


def prose(text: str | None) -> str:
    """A docstring's first paragraph as markdown."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].replace("``", "`").split())


def distributions() -> dict[str, tuple[Path, str]]:
    """Folder and description of each distribution of this repository that offers something by name."""
    found = {}
    for folder in (ROOT / "core", *sorted((ROOT / "plugins").glob("[a-z]*"))):
        if (folder / "pyproject.toml").is_file():
            text = (folder / "pyproject.toml").read_text(encoding="utf-8")
            if folder.name != "core" and "[project.entry-points.drivetrain]" not in text:
                continue  # what others import
            name, about = re.findall(r'^(?:name|description) = "(.*)"$', text, re.M)
            found[name] = (folder, about)
    return found


def offers() -> list[Row]:
    """What this repository's distributions offer; all of them have to be installed."""
    rows = [row for row in get_registry().rows() if row.distribution in distributions()]
    wrong = {row.distribution for row in rows if row.status != "ok"}
    if wrong or (wrong := distributions().keys() - {row.distribution for row in rows}):
        raise SystemExit(f"not installed, or not usable: {', '.join(sorted(wrong))}")
    return rows


# -- hooks -------------------------------------------------------------------------------------------------------------


def fields_table(kind: Any, without: Any = None) -> str:
    """The fields of a dataclass, explained by the "Attributes" of its docstring and of those of its bases."""
    text = "\n".join(inspect.cleandoc(base.__doc__ or "").partition("Attributes:")[2] for base in kind.__mro__)
    said: dict[str, str] = {}
    for names, words in re.findall(r"^ {4}(\w[\w, ]*): ((?:.|\n {8})+)", text, re.M):
        said.update(dict.fromkeys(names.split(", "), prose(words)))
    rows = []
    for field in dataclasses.fields(kind):
        if without is None or field.name not in {own.name for own in dataclasses.fields(without)}:
            default = field.default_factory() if callable(field.default_factory) else field.default
            shown = "required" if default is dataclasses.MISSING else f"`{default!r}`"
            rows.append((f"`{field.name}`", f"`{field.type}`", shown, said.get(field.name, "")))
    return table("field, type, default, meaning", rows) if rows else ""


def hooks() -> str:
    out = f"# Hooks\n\n{(hookspecs.__doc__ or '').replace('``', '`').replace('::', ':').rpartition(' Paste')[0]}\n\n"
    out += "All specs have these fields; a hook's own follow below it.\n\n" + fields_table(PluginSpec)
    for name, hook in HOOKS.items():
        sentence, _, rest = inspect.cleandoc(hook.__doc__).partition("::\n\n")
        spec = SPEC_TYPES.get(name.removeprefix("drivetrain_"))
        kind = spec or getattr(observers, hook.__annotations__["event"])
        example = inspect.cleandoc(rest.partition("\nReturns:")[0])
        imports = f"{spec.__name__}, hookimpl" if spec else "hookimpl"
        out += f"## {name}\n\n{prose(sentence)}.\n\n```python\nfrom drivetrain import {imports}\n\n\n{example}\n```\n\n"
        out += f"{'Returns an iterable of' if spec else 'The event is a'} `{kind.__name__}`. {prose(kind.__doc__)}\n\n"
        out += fields_table(kind, without=PluginSpec if spec else None)
    return out


# -- config ------------------------------------------------------------------------------------------------------------


def words(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return words(args[0])
    if origin is typing.Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("`null`" if arg is type(None) else words(arg) for arg in args)
    if origin is tuple:
        return f"list of {words(args[0])}" if Ellipsis in args else f"list of {len(args)} {words(args[0])}"
    if origin is dict:
        return "mapping"
    return {"str": "text", "Path": "path"}.get(annotation.__name__, annotation.__name__)


def config_rows(fields: dict[str, FieldInfo], prefix: str = "") -> Iterator[Cells]:
    """Key, type, default and description; a section gives a row, and one for each of its keys."""
    for name, info in fields.items():
        key, inside = prefix + name, list(types_inside(info.annotation))
        default = DEFAULTS.get(name) if name in DEFAULTS else info.get_default(call_default_factory=True)
        if info.is_required() and name not in DEFAULTS:
            shown = "required"
        elif isinstance(default, BaseModel):
            shown = "its defaults"
        else:
            shown = f"`{dump_value(list(default) if isinstance(default, tuple) else default)}`"
        hook = next((m.hook for m in [*info.metadata, *(mark for _, mark in inside)] if isinstance(m, Offered)), None)
        if hook:
            kind = "list of sections" if any(mark for _, mark in inside) else "section"
            yield f"`{key}`", kind, shown, f"Its keys: [{hook}](#plugins-{hook})."
        elif inside:
            yield f"`{key}`", "section", shown, prose(info.description or inspect.getdoc(inside[0][0]))
            if not (prefix and inside[0][0] is RunConfig.model_fields["model"].annotation):
                yield from config_rows(inside[0][0].model_fields, f"{key}.")
        else:
            bounds = [f"{sign} {getattr(m, b)}" for m in info.metadata for b, sign in BOUNDS.items() if hasattr(m, b)]
            yield f"`{key}`", ", ".join([words(info.annotation), *bounds]), shown, prose(info.description)


def plugin_sections(model: type[BaseModel] = RunConfig) -> dict[str, type[BaseModel]]:
    """The hooks whose offers have sections, and the base of their config models."""
    found: dict[str, type[BaseModel]] = {}
    for info in model.model_fields.values():
        own = next((m for m in info.metadata if isinstance(m, Offered)), None)
        for kind, mark in types_inside(info.annotation):
            hook = own or mark
            found |= {hook.hook: kind} if hook else plugin_sections(kind)
    return found


def config() -> str:
    head = "key, type, default, meaning"
    out = """# Config

A value is that of the highest layer that has it: command line (`section.key=value`), environment
(`DRIVETRAIN_SECTION__KEY`), YAML file, default. A key that nothing reads is an error. `drivetrain config run.yaml`
prints what holds and where each value came from; `drivetrain schema` writes a JSON schema for editors. A section that a
plugin reads has a `name`, and the keys of the plugin that offers it.

"""
    for name, info in RunConfig.model_fields.items():
        out += f"## {name}\n\n{table(head, list(config_rows({name: info})))}"
    for hook, base in plugin_sections().items():
        shared = {name: info for name, info in base.model_fields.items() if name != "name"}
        out += f"## Plugins: {hook}\n\n"
        out += f"All of them have these keys.\n\n{table(head, list(config_rows(shared)))}" if shared else ""
        for row in (row for row in offers() if row.kind == hook):
            model = get_registry().config_model(hook, row.name) or base
            own = [r for r in config_rows(model.model_fields) if r[0] != "`name`" and r not in [*config_rows(shared)]]
            out += f"### {row.name}\n\n{row.summary} (`{row.distribution}`)\n\n{table(head, own) if own else ''}"
    return out


# -- plugins and columns -----------------------------------------------------------------------------------------------


def plugins() -> str:
    out = "# Plugins\n\nWhat this repository's distributions offer. `drivetrain plugins` lists what is installed.\n\n"
    for distribution, (folder, about) in distributions().items():
        readme = f"../../{folder.relative_to(ROOT).as_posix()}/README.md"
        rows: list[Cells] = []
        for row in (row for row in offers() if row.distribution == distribution):
            spec = get_registry().select(row.kind, row.name).spec
            said = [f"scope {spec.scope}"] if hasattr(spec, "scope") else []
            for key in ("options", "needs", "provides", "requires"):
                if words := getattr(spec, key, ()):
                    said.append(f"{key} {', '.join(f'`{word}`' for word in words)}")
            rows.append((SPEC_TYPES[row.kind].noun, f"`{row.name}`", row.summary, "; ".join(said)))
        out += f"## [{distribution}]({readme})\n\n{about}\n\n{table('kind, name, what it is, contract', rows)}"
    return out


def pages() -> dict[Path, str]:
    about = inspect.cleandoc(columns.__doc__ or "").partition("\n\n")[2]
    standard = f"# Columns\n\nThe standard columns of a `DataProto`. {about}\n\n{columns_markdown()}"
    made = {"hooks": hooks(), "config": config(), "plugins": plugins(), "columns": standard}
    folder, note = ROOT / "docs" / "reference", "<!-- written by docs/generate.py -->\n<!-- fmt: off -->\n\n"
    return {folder / f"{name}.md": note + text.rstrip("\n") + "\n" for name, text in made.items()}


def main(arguments: list[str]) -> int:
    stale = {path: text for path, text in pages().items()
             if not path.is_file() or path.read_text(encoding="utf-8") != text}  # fmt: skip
    for path, text in stale.items():
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        print(f"{'differs:' if '--check' in arguments else 'wrote'} {path.relative_to(ROOT)}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
