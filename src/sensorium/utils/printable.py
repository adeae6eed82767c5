"""Makes text from files, models and servers harmless to a terminal."""

from __future__ import annotations


def make_printable(text: str) -> str:
    r"""Return the text with unprintable characters, but not line breaks, escaped (as `\x1b`)."""
    return "\n".join(map(make_one_line, text.split("\n")))


def make_one_line(text: str) -> str:
    """Return the text as `make_printable` does, and escape its line breaks as well."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
