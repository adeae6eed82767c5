"""How fast the algorithms that may name media digest a file's bytes, on one core.

Sizes of a small picture, of a PNG of 1024 × 1024 and of a short clip; each in turn, many times;
medians in milliseconds and in GB/s. `blake3_threads` uses all cores.

python benchmarks/hashing.py [--rounds N] [--record-to PATH [--commit HASH]]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from blake3 import blake3

from records import write_record

SIZES = (50_000, 1_900_000, 20_000_000)
ALGORITHMS: dict[str, Callable[[bytes], Any]] = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "sha512": lambda data: hashlib.sha512(data).digest(),
    "blake3": lambda data: blake3(data).digest(),
    "blake3_threads": lambda data: blake3(data, max_threads=blake3.AUTO).digest(),
}


def measure(size: int, rounds: int) -> dict[str, dict[str, float]]:
    data = os.urandom(size)
    times: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    for _ in range(rounds):
        for name, digest in ALGORITHMS.items():
            start = perf_counter()
            digest(data)
            times[name].append(perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        name: {"ms": round(1e3 * value, 4), "gb_per_s": round(size / value / 1e9, 3)}
        for name, value in medians.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what digesting media costs.")
    parser.add_argument("--rounds", type=int, default=50, help="of each (default 50)")
    parser.add_argument("--record-to", type=Path, help="a file for the record")
    parser.add_argument("--commit", help="of the tree, where there is no git")
    arguments = parser.parse_args()
    figures = {str(size): measure(size, arguments.rounds) for size in SIZES}
    print(json.dumps(figures, indent=1))
    if arguments.record_to is not None:
        write_record("hashing", figures, path=arguments.record_to, commit=arguments.commit)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
