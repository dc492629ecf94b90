"""HTML that is escaped unless built here: whatever is not ``Html`` is text."""

from __future__ import annotations

import html
import unicodedata

VOID = {"meta", "link", "wbr"}


class Html(str):
    """Markup that is safe to insert."""

    __slots__ = ()


Child = object


def text(value: object) -> Html:
    """Escape a value; control characters, which a page cannot show, become their pictures."""
    if isinstance(value, Html):
        return value
    return Html(html.escape("".join(map(_visible, str(value)))))


def el(name: str, /, *children: Child, **attributes: object) -> Html:
    """An element. ``class_`` is ``class``, underscores in names are hyphens; None leaves an attribute out."""
    parts = [name]
    for key, value in attributes.items():
        if value is None:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{text(value)}"')
    inner = "".join(text(child) for child in children if child is not None)
    return Html(f"<{' '.join(parts)}>" if name in VOID else f"<{' '.join(parts)}>{inner}</{name}>")


def join(*children: Child) -> Html:
    """Several children without an element around them."""
    return Html("".join(text(child) for child in children if child is not None))


def _visible(c: str) -> str:
    if c in "\n\t" or c.isprintable():
        return c
    code = ord(c)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if unicodedata.category(c) == "Zs":
        return c
    return f"\\u{code:04x}"
