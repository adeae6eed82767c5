"""Makes text harmless to a terminal: names of files, and what models or servers say."""

from __future__ import annotations


def make_printable(text: str) -> str:
    r"""Return the text with an escape such as `\x1b` for each unprintable character.

    Such characters could move the cursor or change the terminal's state. Line breaks are kept.
    """
    return "\n".join(map(make_one_line, text.split("\n")))


def make_one_line(text: str) -> str:
    """Return the text as `make_printable` does, with its line breaks escaped, too."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
