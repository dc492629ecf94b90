"""The dataset ``jsonl``, and how a record becomes an example."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from drivetrain.contracts.data import Example
from drivetrain.errors import UserError

if TYPE_CHECKING:
    from drivetrain.builtin.configs import JsonlConfig, RecordConfig


def example_from_record(record: Mapping[str, Any], config: RecordConfig, *, source: str, where: str) -> Example:
    """The example that a record holds; keys that the config does not name become ``extra``.

    Args:
        source: the data source, if the config names none.
        where: place of the record in error messages, such as ``train.jsonl:3``.

    Raises:
        UserError: a key is missing or its value has the wrong type.
    """
    found: dict[str, Any] = {}
    for option in ("prompt", "answer", "response", "rejected"):
        key = getattr(config, f"{option}_key")
        if key is None:
            continue
        value: Any = record
        for part in [key] if key in record else key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise UserError(f"the record has no key {key!r}", where=where, details=[("keys", ", ".join(record))],
                                mend=f"set {option}_key, or add the key to the record")  # fmt: skip
            value = value[part]
        if option == "answer" and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) and not (option == "prompt" and _is_chat(value)):
            wanted = "text or a list of messages with role and content" if option == "prompt" else "text"
            raise UserError(f"{key!r} is {value!r:.60}, but must be {wanted}", where=where,
                            mend=f"mend the record, or set {option}_key")  # fmt: skip
        found[option] = value
    named = {config.prompt_key, config.answer_key, config.response_key, config.rejected_key}
    extra = {key: value for key, value in record.items() if key not in named}
    return Example(**found, data_source=config.data_source or source, extra=extra)


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )  # fmt: skip


class JsonlDataset(list[Example]):
    """The examples of a file with one JSON object a line; blank lines are left out."""

    def __init__(self, config: JsonlConfig) -> None:
        """Read the file. Raises UserError with file and line for what is no example."""
        path = config.path
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the data file: {error}", where=str(path), mend="set path") from error
        for number, line in islice(((n, line) for n, line in enumerate(lines, 1) if line.strip()), config.limit):
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"no JSON: {error.msg} at column {error.colno}", where=where,
                                mend="write one JSON object a line") from error  # fmt: skip
            if not isinstance(record, dict):
                raise UserError("the line is no JSON object", where=where, mend="write one JSON object a line")
            self.append(example_from_record(record, config, source=path.stem, where=where))
