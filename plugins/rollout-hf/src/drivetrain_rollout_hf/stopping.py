"""When a response ends: end-of-sequence tokens, and strings that are looked for while tokens come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_LONGEST_CHARACTER = 8  # tokens; after so many, text that still ends in no character never will
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any | None:
    """The tokenizer of a folder, or None if the folder has none."""
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


class StopStrings:
    """Looks for strings in the text of one response, token by token.

    A token's text depends on its neighbours, so a short tail of tokens is decoded with and without the new one. Text
    that ends inside a character waits for the rest of it.
    """

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        self._reach = max(map(len, strings)) - 1
        self._tail: list[int] = []
        self._known = 0  # how many tokens of the tail have their text in `_text`
        self._text = ""

    def push(self, token: int, *, armed: bool = True) -> bool:
        """Add a token.

        Args:
            token: the next one of the response.
            armed: False only records it.

        Returns:
            whether one of the strings has been completed by it.
        """
        before = self._decode(self._tail[: self._known])
        self._tail.append(token)
        fresh = self._decode(self._tail)[len(before) :]
        seen = self._text + fresh
        complete = fresh and not fresh.endswith(_UNFINISHED)
        if complete or len(self._tail) - self._known >= _LONGEST_CHARACTER:
            self._tail = self._tail[self._known :]
            self._known = len(self._tail)
            self._text = seen[-self._reach :] if self._reach else ""
        known = len(seen) - len(fresh)
        return armed and any(seen.find(string, max(0, known + 1 - len(string))) >= 0 for string in self._strings)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
