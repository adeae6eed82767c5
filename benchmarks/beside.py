"""Runs a benchmark of this checkout and of another one in turn, and compares their figures.

The other checkout is usually a `git worktree` of an older commit. Each turn runs
`benchmarks/NAME.py` of both checkouts in processes of their own, with their own sources and the
same flags; the checkout that goes first changes with every turn. The output lists, for each number
that the benchmark prints, the medians of both and the median of the ratios of this checkout to the
other within one turn.

`python benchmarks/beside.py CHECKOUT NAME [--turns N] [--flags=FLAGS] [--record]`

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from records import write_record

ROOT = Path(__file__).parent.parent
Numbers = dict[str, float]  # path of a number in the figures, such as "stages.healthy" -> number


def run(checkout: Path, name: str, flags: list[str]) -> Numbers:
    """Run the benchmark of a checkout, and return the numbers in its last line."""
    paths = [str(checkout / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    script = checkout / "benchmarks" / f"{name}.py"
    ended = subprocess.run(
        [sys.executable, str(script), *flags],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(_list_numbers("", json.loads(ended.stdout.splitlines()[-1])))


def _list_numbers(path: str, figures: Any) -> Iterator[tuple[str, float]]:
    if isinstance(figures, dict):
        for name, value in figures.items():
            yield from _list_numbers(f"{path}.{name}" if path else name, value)
    elif isinstance(figures, int | float) and not isinstance(figures, bool):
        yield path, float(figures)


def compare(ours: list[Numbers], others: list[Numbers]) -> dict[str, dict[str, float]]:
    """Return the medians and the ratio of each number that both checkouts print in every turn."""
    common = set.intersection(*(set(numbers) for numbers in (*ours, *others)))
    return {
        name: {
            "ours": statistics.median(numbers[name] for numbers in ours),
            "other": statistics.median(numbers[name] for numbers in others),
            "ratio": statistics.median(
                own[name] / other[name] for own, other in zip(ours, others, strict=True)
            ),
        }
        for name in ours[0]
        if name in common and all(numbers[name] for numbers in others)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="the folder of the other checkout")
    parser.add_argument("name", help="the benchmark, for example core_step")
    parser.add_argument("--turns", type=int, default=5, help="runs of each checkout (default 5)")
    parser.add_argument("--record", action="store_true", help="write records/beside_NAME.json")
    parser.add_argument(
        "--flags", type=shlex.split, default=[], help='given to both, as in --flags="--rounds 3"'
    )
    arguments = parser.parse_args()
    other = arguments.checkout.resolve()
    numbers: dict[Path, list[Numbers]] = {ROOT: [], other: []}
    for turn in range(arguments.turns):
        for checkout in sorted(numbers, key=lambda path: (path == ROOT) == turn % 2):
            numbers[checkout].append(run(checkout, arguments.name, arguments.flags))
        print(f"turn {turn + 1} of {arguments.turns} is done", flush=True)
    table = compare(numbers[ROOT], numbers[other])
    for name, row in table.items():
        print(f"{name}: {row['ours']:.4g} beside {row['other']:.4g}, ratio {row['ratio']:.3f}")
    commit = subprocess.check_output(["git", "-C", str(other), "rev-parse", "HEAD"], text=True)
    figures = {"other_commit": commit.strip(), "num_turns": arguments.turns, "figures": table}
    if arguments.record:
        print(f"record: {write_record(f'beside_{arguments.name}', figures).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
