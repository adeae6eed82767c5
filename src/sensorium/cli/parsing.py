"""Values of flags: what a word on the command line means, or why it means nothing."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_INTEGER = 2**63 - 1  # that goes to other processes
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_COUNT = re.compile(r"(\w+)=(\d+)")


def at_least(least: int, most: int = MAX_INTEGER) -> Callable[[str], int]:
    """An integer from `least` to `most`."""
    words = f"at least {least}" if most == MAX_INTEGER else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"it must be {words}, not {value}")
        return value

    return parse


def between(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"it must be from {least:g} to {most:g}, not {text}")
        return value

    return parse


def parse_bytes(text: str) -> int:
    """Read a number of bytes. The words 4294967296, 4G, 4GiB and 4096M mean the same."""
    match = _BYTES.fullmatch(text.strip())
    num_bytes = 0 if match is None else int(float(match[1]) * 2 ** _POWERS[match[2].lower()])
    if not 1 <= num_bytes <= MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes: use e.g. 4G")
    return num_bytes


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes that are divided by commas, such as `1,2,4`."""
    try:
        return tuple(at_least(1)(word) for word in text.split(","))
    except argparse.ArgumentTypeError as error:
        hint = "sizes are divided by commas, such as 1,2,4; --enforce-eager turns graphs off"
        raise argparse.ArgumentTypeError(f"{error} ({hint})") from error


def parse_mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is needed")
    return value


def parse_counts(text: str) -> dict[str, int]:
    """Read counts by modality, written as `{"image": 4}` or as `image=4,video=1`."""
    if text.lstrip().startswith("{"):
        counts = parse_mapping(text)
    else:
        matches = [_COUNT.fullmatch(part.strip()) for part in text.split(",")]
        counts = {match[1]: int(match[2]) for match in matches if match is not None}
        if None in matches:
            raise argparse.ArgumentTypeError("use JSON, or e.g. image=4,video=1")
    for modality, count in counts.items():
        if modality not in ("image", "audio", "video"):
            raise argparse.ArgumentTypeError(f"{modality!r} is not image, audio or video")
        if type(count) is not int or count < 0:
            raise argparse.ArgumentTypeError(f"{modality}: an integer of at least 0 is needed")
    return counts


def parse_file(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return text
