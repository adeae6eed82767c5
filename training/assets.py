"""Prepares all that training needs: `python -m training.assets build/training`."""

from __future__ import annotations

import subprocess
import sys

PARTS = ("assets_pictures", "assets_speech", "assets_tokenizer")


def main() -> None:
    for part in PARTS:
        print(f"{part} ...", flush=True)
        subprocess.run([sys.executable, "-m", f"training.{part}", *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
