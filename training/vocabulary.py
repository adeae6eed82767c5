"""Writes the page of all words and emoji of sensorium-mini.

    python -m training.vocabulary docs/sensorium-mini-words.md [--check]

With `--check` nothing is written, and the exit status is 1 if the page is not up to date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from textwrap import fill

from training.pictures.emoji_names import EMOJI_GROUPS, EMOJI_NAMES
from training.speech.words import VOCABULARY
from training.tasks.palette import COLOURS
from training.tasks.scenes import SHAPES

COLUMNS = 100
_HEAD = """\
# Words and emoji of sensorium-mini

`python -m training.vocabulary` makes this page from the lists that the model was trained with, and
a test compares the two. [The model card](sensorium-mini.md) describes what the model does with
them.
"""


def make_page() -> str:
    emoji = "\n".join(
        _wrap(f"- {group}: {', '.join(names)}", indent="  ")
        for group, names in EMOJI_GROUPS.items()
    )
    return "\n".join(
        (
            _HEAD,
            f"## {len(VOCABULARY)} words that it can transcribe\n",
            f"```text\n{_wrap(' '.join(VOCABULARY))}\n```",
            f"\n## {len(EMOJI_NAMES)} emoji that it can name\n",
            emoji,
            f"\n## {len(SHAPES)} shapes and {len(COLOURS)} colours\n",
            _wrap(f"- shapes: {', '.join(SHAPES)}", indent="  "),
            _wrap(f"- colours: {', '.join(COLOURS)}", indent="  "),
            "",
        )
    )


def _wrap(text: str, indent: str = "") -> str:
    return fill(text, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    arguments = parser.parse_args()
    page = make_page()
    if arguments.check:
        sys.exit(arguments.page.read_text() != page)
    arguments.page.write_text(page)


if __name__ == "__main__":
    main()
