"""Writes docs/options.md from the declarations of all options.

    python scripts/make_options_doc.py [--check]

`--check` writes nothing, and fails if the page differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from sensorium.engine.build.options import (
    EncodeOptions,
    EngineOptions,
    LoadingOptions,
    MediaOptions,
)
from sensorium.multimodal.media import MediaLimits
from sensorium.scale.options import ScaleOptions
from sensorium.server.options import ServeOptions
from sensorium.types.options import SERVERS, Option, list_options

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
_HEAD = """\
# Options

Made by `scripts/make_options_doc.py` from the declarations in the code; a test checks it. Each
option is declared once, and is the same for the command line and for `LLM`. A flag that is on by
default is turned off with `--no-…`. The commands `chat` and `generate` also take the parameters of
`SamplingParams` as flags: see `sensorium chat --help`.
"""
_GROUPS: tuple[tuple[str, type, str], ...] = (
    ("Loading", LoadingOptions, "Keywords of `LLM`, and flags."),
    ("Engine", EngineOptions, "Keywords of `LLM`, and flags."),
    ("Media", MediaOptions, "Keywords of `LLM`, and flags."),
    (
        "Limits of media",
        MediaLimits,
        "Fields of `sensorium.MediaLimits`, which `LLM` takes as `media_limits`, and flags.",
    ),
    (
        "Server",
        ServeOptions,
        "Flags of `serve`, `render` and `deploy` only; `encode` has those for logs.",
    ),
    ("Encoder", EncodeOptions, "Flags of `encode` only."),
    ("Cluster", ScaleOptions, "Flags of `deploy` only."),
)


def make_page() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for title, group, text in _GROUPS:
        has_keywords = group not in (ServeOptions, EncodeOptions, ScaleOptions)
        parts.append(f"\n## {title}\n\n{text}\n\n{_make_table(group, has_keywords)}")
    return "".join(parts)


def _make_table(group: type, has_keywords: bool) -> str:
    header = ["flag", "default", "commands", "meaning"]
    rows = [header, ["---"] * len(header), *map(_make_row, list_options(group))]
    if has_keywords:
        names = ["keyword", "---", *(f"`{each.name}`" for each in list_options(group))]
        rows = [[name, *row] for name, row in zip(names, rows, strict=True)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _make_row(each: Option) -> list[str]:
    default = each.describe_default()
    if each.server_default:
        default += f"; of a server: {each.describe_default(SERVERS[0])}"
    if each.unit != 1:
        default += f" (`{each.flag} {each.describe_default(SERVERS[0])}`)"
    repeated = " May be repeated." if each.kind == "texts" else ""
    rule = "" if each.kind in ("switch", "text", "file", "texts", "names") else each.rule
    if each.choices:
        named = set(re.findall(r"\w+", each.help))
        rule = "" if named.issuperset(each.choices) else each.rule
    if each.metavar == "SECONDS":
        rule = rule.replace("a number", "a number of seconds", 1)
    bounds = f" It must be {rule}." if rule else ""
    meaning = f"{each.help}{repeated}{bounds}".replace("|", "\\|")
    flag = f"`{each.flag}`" if each.flag else "-"
    return [flag, default, ", ".join(each.commands) or "-", meaning]


def main() -> None:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description="Write docs/options.md.")
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    page = make_page()
    if not arguments.check:
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        sys.exit("docs/options.md is out of date: run `python scripts/make_options_doc.py`")


if __name__ == "__main__":
    main()
