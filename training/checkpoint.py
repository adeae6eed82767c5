"""Writes the stock checkpoint of trained weights.

`python -m training.checkpoint build/training TRAINED OUT`
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sensorium.models import ensure_torchvision
from training.architecture import make_config, save_stock
from training.model import Thinker
from training.tokenizer import load_tokenizer
from training.weights import initialize, load_whisper, make_stock, restore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what training.assets has prepared")
    parser.add_argument("trained", type=Path, help="what training.train has written")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    ensure_torchvision()
    tokenizer = load_tokenizer(arguments.folder / "tokenizer")
    config = make_config(tokenizer)
    model = Thinker(config)
    initialize(model, 0, 0)
    load_whisper(model, arguments.folder)
    restore(model, arguments.trained)
    save_stock(arguments.out, make_stock(model, config), tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters in {arguments.out}")


if __name__ == "__main__":
    main()
