"""Writes the figures of README.md, docs/figures.md and docs/security.md from the records.

    python scripts/make_figures_doc.py [--check]

docs/figures.md is `scripts/figures_page.txt` with each `{record/path:format}` replaced by the
number at that place of `benchmarks/records/RECORD.json`, and with the tables that compare two
servers. README.md has such a table between two marks, docs/security.md one of what attacks cost.
`--check` writes nothing and fails if a page differs from the records.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"
TEMPLATE = Path(__file__).parent / "figures_page.txt"
PAGE = ROOT / "docs" / "figures.md"
README = ROOT / "README.md"
SECURITY = ROOT / "docs" / "security.md"
MARKS = "<!-- made by scripts/make_figures_doc.py -->", "<!-- until here -->"
# The README prints a row from the first of these that has it, and the ratios of all.
SHAPES = {"3B": "beside_vllm_3b", "7B": "beside_vllm_7b", "Whisper": "beside_vllm_whisper"}
# Each has some of the attacks. What several have is printed from the last one.
ATTACK_RECORDS = ("attack_costs_stores", "attack_costs")
# In the order of the page. The name is that of the benchmark.
ATTACKS = {
    "9 long text": "texts of 8 MB from four clients, each two seconds after its last answer",
    "10 enlarged media": "small pictures with options that enlarge them, ten a second at most",
    "11 slow hosts": "128 URLs of a host that never answers, 64 of them in one request",
    "12 costly media": "videos of 50 gigapixels in 100 KB from two clients, which are refused",
    "12 costly media within the limits": "videos of 7 gigapixels from two clients, decoded",
    "13 slow bodies": "600 bodies and 100 heads at one byte a second, and 100 silent connections",
    "14 full disk": "a full disk of temporary files",
    "16 greedy stream": "a request for 128 completions, whose stream the client never reads",
    "22 bad handshakes": "WebSocket handshakes that can't be parsed, without end",
    "23 small pieces": "fragments, pings and chunks of a few bytes, sent without a pause",
    "23 small pieces behind deploy": "the same pieces, sent to a cluster of `sensorium deploy`",
    "24 long prompts": "prompts that fill the context, without end",
    "25 damaged disk cache": "pictures with damaged entries in a disk cache, at most ten a second",
    "26 silent store": "new pictures, with a Redis that is silent for 5 of 10 seconds",
    "26 slow store": "requests for 4 new pictures from 40 clients, with a Redis that takes 1.5 s",
    "21 endless speech": "1.5 seconds of audio, four clients, options that make Whisper never stop",
}
_WAIT = "ttft_p50_ms"
_TIMES = ("ms", "s")  # less is better
_UNITS = {"requests_per_s": "requests/s", "tokens_per_s": "tokens/s"}
_OF_A_RECORD = ("hardware", "versions", "date", "commit")  # other paths begin in its figures

Record = Mapping[str, Any]


@lru_cache
def read_record(name: str) -> Any:
    return json.loads((RECORDS / f"{name}.json").read_text())


class RecordFormatter(string.Formatter):
    """A formatter with fields that are places in records: `offline/ratio/8`."""

    def get_field(
        self,
        field_name: str,
        args: Sequence[Any],  # noqa: ARG002
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, str]:
        if field_name in kwargs:
            return kwargs[field_name], field_name
        name, *path = field_name.split("/")
        found = read_record(name)
        if path[0] not in _OF_A_RECORD:
            found = found["figures"]
        for key in path:
            found = found[int(key)] if isinstance(found, list) else found[key]
        return found, field_name


# ---- tables of two servers


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of a load, for the peer and for us."""

    load: str
    figure: str
    what: str
    size: str  # how many requests, and the least and most prompt tokens that one has
    cells: list[str]  # the peer's rounds and ours, the better ones bold
    ratio: str


def make_rows(record: Record) -> list[Row]:
    rows = []
    for name, load in record["figures"]["loads"].items():
        rows.append(_make_row(name, load, load["headline"], load["what"]))
        if load["headline"] != _WAIT and _WAIT in load["ratio"]:
            rows.append(_make_row(name, load, _WAIT, "the same: median time to the first token"))
    return rows


def _make_row(name: str, load: Record, figure: str, what: str) -> Row:
    rounds = [[each[figure] for each in load[side]] for side in ("peer", "ours")]
    unit = "ms" if figure.endswith("_ms") else _UNITS[figure]
    return Row(
        load=name,
        figure=figure,
        what=what,
        size=_print_size(load),
        cells=_mark_better(rounds, unit),
        ratio=f"{load['ratio'][figure]:.2f}",
    )


def _print_size(load: Record) -> str:
    num_requests = f"{load['num_requests']:,}"
    return f"{num_requests} ({_print_num_tokens([load])})" if _is_chat(load) else num_requests


def _print_num_tokens(loads: Iterable[Record]) -> str:
    """Return the least and the most prompt tokens of a request of these loads."""
    counts = [count for load in loads for count in load["num_prompt_tokens"]]
    return " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))


def _is_chat(load: Record) -> bool:
    return "max_tokens" in load  # transcripts have none


def _print(numbers: Sequence[float], unit: str) -> str:
    return f"{', '.join(print_number(number) for number in numbers)} {unit}"


def print_number(number: float) -> str:
    """Return a number rounded to three digits."""
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def _mark_better(rounds: Sequence[Sequence[float]], unit: str) -> list[str]:
    """Return cells with the rounds of the peer and with ours.

    The one that is better in all rounds is bold.
    """
    cells = [_print(each, unit) for each in rounds]
    winners = {(ours > theirs) - (ours < theirs) for theirs, ours in zip(*rounds, strict=True)}
    if winners not in ({1}, {-1}):
        return cells
    is_ours = winners == ({-1} if unit in _TIMES else {1})
    return [f"**{cell}**" if place == is_ours else cell for place, cell in enumerate(cells)]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def make_table(record: Record) -> str:
    """Return a table of all that was measured of two servers."""
    loads = record["figures"]["loads"]
    rows: list[list[str]] = []
    for row in make_rows(record):
        is_headline = row.figure == loads[row.load]["headline"]
        rows.append([row.what, row.size if is_headline else "", *row.cells, row.ratio])
    servers = record["figures"]["servers"]
    starts = [servers[side].get("start_s") for side in ("peer", "ours")]
    if all(starts):
        ratio = mean(starts[1]) / mean(starts[0])
        cells = _mark_better(starts, "s")
        rows.append(["from the start to the first answer of /health", "", *cells, f"{ratio:.2f}"])
    size = f"requests{' (prompt tokens)' if any(map(_is_chat, loads.values())) else ''}"
    return print_table(["what", size, *_get_names(record), "ratio"], rows)


def _get_names(record: Record) -> list[str]:
    names = []
    for side in ("peer", "ours"):
        server = record["figures"]["servers"][side]
        version = server["version"]
        number = version if isinstance(version, str) else version["version"]
        names.append(f"{server['name']} {number}")
    return names


def make_readme_table(records: Mapping[str, Record]) -> str:
    by_load: dict[str, dict[str, list[Row]]] = {}
    for shape, record in records.items():
        for row in make_rows(record):
            by_load.setdefault(row.load, {}).setdefault(shape, []).append(row)
    lines = []
    for found in by_load.values():
        shape, (row, *_) = next(iter(found.items()))
        loads = [records[each]["figures"]["loads"][row.load] for each in found]
        num_tokens = _print_num_tokens(loads) if _is_chat(loads[0]) else "-"
        mark = "" if shape == next(iter(records)) else f" ({shape})"
        ratios = [_print_ratios(found.get(each, [])) for each in records]
        lines.append([f"{row.what}{mark}", num_tokens, *row.cells, *ratios])
    names = _get_names(next(iter(records.values())))
    columns = ["what", "prompt tokens", *names, *(f"ratio {shape}" for shape in records)]
    return print_table(columns, lines)


def _print_ratios(rows: Sequence[Row]) -> str:
    """Return the ratio of a load, then in brackets that of the times to the first token, if any."""
    first, *waits = [row.ratio for row in rows] or ["-"]
    return " ".join([first, *(f"({wait})" for wait in waits)])


def make_attacks_table(records: Iterable[Record]) -> str:
    """Return how much longer other clients wait during each attack."""
    figures = {name: found for record in records for name, found in record["figures"].items()}
    rows = []
    for name, what in ATTACKS.items():
        found = figures[name]
        if found["faults"]:
            sys.exit(f"a record has wrong answers during the attack {name!r}")
        kinds = found["kinds"].values()
        longest = max(kind["longest_longer_s"] for kind in kinds)
        ratios = [f"{kind['median_ratio']:.2f}\N{MULTIPLICATION SIGN}" for kind in kinds]
        rows.append([what, *ratios, f"{max(longest, 0):+.1f} s"])
    header = ["attack", "text", "picture, cached", "picture, new", "longest wait, at most"]
    return print_table(header, rows)


# ---- pages


def make_page(template: str) -> str:
    tables = {f"table_{shape}": make_table(read_record(name)) for shape, name in SHAPES.items()}
    return RecordFormatter().vformat(template, (), tables)


def put_table(text: str, table: str) -> str:
    """Return the page with this table between its marks, and all else unchanged."""
    head, rest = text.split(f"{MARKS[0]}\n")
    tail = rest.split(MARKS[1])[1]
    return f"{head}{MARKS[0]}\n{table}\n{MARKS[1]}{tail}"


def make_pages() -> dict[Path, str]:
    records = {shape: read_record(name) for shape, name in SHAPES.items()}
    attacks = make_attacks_table(map(read_record, ATTACK_RECORDS))
    return {
        PAGE: make_page(TEMPLATE.read_text()),
        README: put_table(README.read_text(), make_readme_table(records)),
        SECURITY: put_table(SECURITY.read_text(), attacks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the figures of three pages.")
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    pages = make_pages()
    old = [path for path, page in pages.items() if not path.exists() or path.read_text() != page]
    if not arguments.check:
        for path in old:
            path.write_text(pages[path])
    elif old:
        names = " and ".join(path.relative_to(ROOT).as_posix() for path in old)
        sys.exit(f"{names}: not as in the records; run `python scripts/make_figures_doc.py`")


if __name__ == "__main__":
    main()
