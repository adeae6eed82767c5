"""Collects what `training.evaluate` has recorded of the embedded model into one record.

    python -m training.evaluate build/heldout --base-url URL --record cold.json --again warm.json
    python -m training.evaluate build/heldout --checkpoint DIR --count 7 --record alone.json
    python benchmarks/accuracy.py cold=cold.json warm=warm.json ... --alone alone.json --record

Shares of right answers of each pass, and how many answers of each are, token for token, those of
Transformers' `generate`, and those of the first pass.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from records import write_record

ROOT = Path(__file__).parents[1]
MANIFEST = ROOT / "src/sensorium/embedded/sensorium-mini/manifest.json"


def count_equal(record: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Count the cases that both records have and those with equal tokens, and list the others."""
    common = [key for key in record["answers"] if key in other["answers"]]
    different = [
        key for key in common if not _is_equal(record["answers"][key], other["answers"][key])
    ]
    return {"cases": len(common), "equal": len(common) - len(different), "different": different}


def _is_equal(one: list[Any], other: list[Any]) -> bool:
    """Compare token by token, or by text where tokens were not recorded."""
    return one[0] == other[0] and (None in (one[1], other[1]) or one[1] == other[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("passes", nargs="+", metavar="NAME=RECORD")
    parser.add_argument("--alone", type=Path, help="of Transformers' `generate`")
    parser.add_argument("--record", action="store_true", help="write records/accuracy.json")
    arguments = parser.parse_args()
    pairs = [entry.split("=", 1) for entry in arguments.passes]
    records = {name: json.loads(Path(path).read_text()) for name, path in pairs}
    first = records[pairs[0][0]]
    passes: dict[str, Any] = {}
    for name, record in records.items():
        passes[name] = {key: value for key, value in record.items() if key != "answers"}
        if record is not first:
            passes[name]["as_first_pass"] = count_equal(record, first)
        if arguments.alone:
            alone = json.loads(arguments.alone.read_text())
            passes[name]["as_generate"] = count_equal(record, alone)
        print(name, {key: value for key, value in passes[name].items() if key != "scores"})
    manifest = json.loads(MANIFEST.read_text())
    figures = {"passes": passes, "manifest": manifest}
    if arguments.record:
        print(write_record("accuracy", figures))


if __name__ == "__main__":
    main()
