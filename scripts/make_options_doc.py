"""Writes docs/options.md and docs/from-vllm.md from the declarations of all options and flags.

    python scripts/make_options_doc.py [--check]

`--check` writes nothing, and fails if a page differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from sensorium.cli.vllm.flags import FLAGS, ForeignFlag
from sensorium.cli.vllm.table import ANY
from sensorium.engine.assembly.options import (
    EncodeOptions,
    EngineOptions,
    LoadingOptions,
    MediaOptions,
)
from sensorium.multimodal.media import MediaLimits
from sensorium.scale.options import ScaleOptions
from sensorium.server.options import ServeOptions
from sensorium.types.options import SERVERS, Option, list_options

DOCS = Path(__file__).parent.parent / "docs"
_HEAD = """\
# Options

Made by `scripts/make_options_doc.py` from the declarations in the code; a test checks it. Each
option is declared once, and is the same for the command line and for `LLM`. A flag that is on by
default is turned off with `--no-…`. The commands `chat` and `generate` also take the parameters of
`SamplingParams` as flags: see `sensorium chat --help`. Flags of `vllm serve` that are not here are
also accepted, or refused with a reason: see [from-vllm.md](from-vllm.md).
"""
_FROM_VLLM = """\
# From vLLM

Made by `scripts/make_options_doc.py` from the tables in `cli/vllm`; a test checks it.

`sensorium serve` accepts the command line of `vllm serve` where it can. Flags of the same name have
the same purpose: [options.md](options.md) lists them. `--max-model-len` and
`--max-num-batched-tokens` take `4k` (4000), `4K` (4096) and `auto`; `--dtype` takes `half` and
`float`; `--generation-config vllm` means `none`; lists such as `--allowed-origins '["*"]'` may be
JSON. Units of `--kv-cache-memory-bytes` are powers of 1024 here, also in small letters.

Servers here don't have the flags below. Some are translated into another option. The others change
nothing: with the listed values they are accepted, and a line on stderr says so. With other values
they are refused with the sentence in the table, so that no flag is ignored silently. For a switch,
`on` means that the flag itself is accepted, `off` that its form with `--no-` is.
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


def make_page_for_vllm() -> str:
    """Return the text of the page for those who come from vLLM."""
    taken = [
        f"| `{each.name}` | {each.sentence.replace('|', '/')} |\n" for each in FLAGS if each.option
    ]
    others = [_make_foreign_row(each) for each in FLAGS if not each.option]
    return "".join(
        (
            _FROM_VLLM,
            "\n## Taken as another option\n\n| flag | meaning |\n| --- | --- |\n",
            *taken,
            "\n## Without effect, or refused\n\n",
            "| flag | accepted values | what there is instead |\n| --- | --- | --- |\n",
            *others,
        )
    )


def _make_foreign_row(each: ForeignFlag) -> str:
    accepted = ", ".join("any" if value == ANY else f"`{value}`" for value in each.accepted)
    names = ", ".join(f"`{name}`" for name in each.names)
    return f"| {names} | {accepted or '-'} | {each.sentence} |\n"


def main() -> None:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description="Write docs/options.md and docs/from-vllm.md.")
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    pages = {"options.md": make_page(), "from-vllm.md": make_page_for_vllm()}
    for name, page in pages.items():
        path = DOCS / name
        if not arguments.check:
            path.write_text(page)
        elif not path.exists() or path.read_text() != page:
            sys.exit(f"docs/{name} is out of date: run `python scripts/make_options_doc.py`")


if __name__ == "__main__":
    main()
