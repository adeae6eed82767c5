"""Reads the values of options on the command line, or raises an `ArgumentTypeError`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from sensorium.types.options import Kind

MAX_INTEGER = 2**63 - 1  # the largest number that can be sent to another process
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_COUNT = re.compile(r"(\w+)=(\d+)")
# A whole number, and one that may have a fraction. Small letters stand for powers of 1000, and
# capitals for powers of 1024, as in vLLM.
_TOKENS = re.compile(r"(\d+)([KMGT]?)|(\d+(?:\.\d+)?)([kmgt])")
_TOKEN_UNITS = {"": 1} | {
    unit: base**power
    for base, units in ((1000, "kmgt"), (1024, "KMGT"))
    for power, unit in enumerate(units, 1)
}


def split_list(text: str) -> list[str]:
    """Return the texts of a JSON list, or only `text` itself if it is not such a list."""
    try:
        items = json.loads(text) if text.startswith("[") else None
    except ValueError:  # such as the address [::1]
        return [text]
    if isinstance(items, list) and all(isinstance(item, str) for item in items):
        return items
    return [text]


def _parse_number(text: str, kind: type[int | float] = float, noun: str = "a number") -> float:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {noun}") from None


def _parse_bytes(text: str) -> int:
    """Return the bytes of a text such as "4294967296", "4G" or "4096M" (powers of 1024)."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes: use e.g. 4G")
    return int(float(match[1]) * 2 ** _POWERS[match[2].lower()])


def _parse_tokens(text: str) -> int | None:
    """Return the number of "4096", "4k" (4000), "4K" (4096) or "2.5k"; None for "auto" and "-1"."""
    if text.strip().lower() in ("auto", "-1"):
        return None
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an integer: use e.g. 4096, 4k (4000), 4K (4096) or auto"
        )
    number, unit = match[1] or match[3], match[2] or match[4]
    return int(Decimal(number) * _TOKEN_UNITS[unit or ""])


def _parse_sizes(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= MAX_INTEGER for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of integers >= 1 like 1,2,4; --enforce-eager disables graphs"
        )
    return tuple(map(int, words))


def _parse_mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"the value is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('a JSON object is needed, such as {"name": 1}')
    return value


def _parse_counts(text: str) -> dict[str, int]:
    """Return a count for each modality, from text such as '{"image": 4}' or "image=4,video=1"."""
    if text.lstrip().startswith("{"):
        return _parse_mapping(text)
    matches = [_COUNT.fullmatch(part.strip()) for part in text.split(",")]
    if None in matches:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of counts: use JSON, or e.g. image=4,video=1"
        )
    return {match[1]: int(match[2]) for match in matches if match is not None}


def _parse_file(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return text


PARSERS: dict[Kind, Callable[[str], Any]] = {
    "integer": partial(_parse_number, kind=int, noun="an integer"),
    "tokens": _parse_tokens,
    "number": _parse_number,
    "bytes": _parse_bytes,
    "sizes": _parse_sizes,
    "counts": _parse_counts,
    "mapping": _parse_mapping,
    "file": _parse_file,
}
