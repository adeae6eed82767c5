"""No text moves the cursor or changes the terminal, and none is lost."""

from __future__ import annotations

from sensorium.utils.printable import make_one_line, make_printable


def test_unprintable_characters_are_escaped() -> None:
    assert make_printable("a\x1b[2Jb\rc\nd é 日本") == "a\\x1b[2Jb\\rc\nd é 日本"
    assert make_one_line("\x9b2J\n\u202e\udcff") == "\\x9b2J\\n\\u202e\\udcff"
