"""Pictures to look at: everything that can be drawn, small and large, straight and turned.

python -m training.pictures.contact_sheets build/training/sheets
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from training.pictures.emoji_names import EMOJI_NAMES
from training.pictures.lines import ATLAS_PATH, CHARACTERS, FONTS, make_line
from training.pictures.rendering import Renderer, augment, pack_canvases
from training.pictures.shapes import SHAPE_NAMES
from training.samples import Canvas, Size, Sprite

_CELL = 112
_COLUMNS = 12


def save_picture(picture: torch.Tensor, path: Path) -> None:
    """Save a picture [3, H, W] from 0 to 1 as a PNG file."""
    array = (picture.permute(1, 2, 0) * 255).round().byte().cpu().numpy()
    Image.fromarray(array).save(path)


def _write(canvas: Canvas, text: str, font: int, x: float, y: float, height: float) -> None:
    """Put a line of text with its left end at x."""
    line = make_line(text, font)
    width = line.width * height / len(line.coverage)
    number = len(canvas.lines)
    canvas.lines.append(line)
    canvas.sprites.append(Sprite("line", number, x + width / 2, y, width, height))


def shape_sheet() -> tuple[Canvas, Size]:
    canvas = Canvas((1, 1, 1), (0.7, 0.8, 0.9), 0.5)
    for n in range(len(SHAPE_NAMES)):
        for row, (side, angle) in enumerate(((80, 0.0), (80, 0.3), (24, 0.0), (12, 0.0))):
            colour = (0.1 + 0.08 * n, 0.2, 0.9 - 0.08 * n)
            place = (60 + 100 * n, 60 + 90 * row)
            canvas.sprites.append(Sprite("shape", n, *place, side, side, angle, colour))
    return canvas, (400, 1020)


def font_sheet() -> tuple[Canvas, Size]:
    canvas = Canvas()
    for n in range(len(FONTS)):
        _write(canvas, CHARACTERS, n, 10, 25 + 40 * n, 32)
        _write(canvas, "Small words 16", n, 1110, 25 + 40 * n, 16)
    return canvas, (40 * len(FONTS) + 20, 1240)


def emoji_sheet(concepts: range, num_styles: int = 2) -> tuple[Canvas, Size]:
    canvas = Canvas((1, 1, 1), (0.8, 0.9, 0.8), 1.0)
    for n, concept in enumerate(concepts):
        left, top = n % _COLUMNS * _CELL, n // _COLUMNS * _CELL
        for style in range(num_styles):
            number, x = concept * num_styles + style, left + 30 + 52 * style
            canvas.sprites.append(Sprite("emoji", number, x, top + 30, 50, 50))
            canvas.sprites.append(Sprite("emoji", number, x, top + 76, 24, 24, 0.5))
        _write(canvas, EMOJI_NAMES[concept], 0, left + 4, top + 100, 18)
    return canvas, (-(-len(concepts) // _COLUMNS) * _CELL, _COLUMNS * _CELL)


def mixed_pictures(renderer: Renderer, size: Size = (224, 224)) -> torch.Tensor:
    """Six random pictures as they are, above the same ones augmented: [3, H, W]."""
    random = np.random.default_rng(0)
    canvases = []
    for _ in range(6):
        canvas = Canvas(tuple(random.random(3)), tuple(random.random(3)), random.uniform(0, 6))
        for k in range(5):
            x, y = random.uniform(30, size[1] - 30), random.uniform(30, size[0] - 30)
            side, angle, colour = random.uniform(20, 80), random.normal(0, 0.2), random.random(3)
            number = int(random.integers(len(SHAPE_NAMES) if k % 2 else 2 * len(EMOJI_NAMES)))
            sprite = Sprite("emoji", number, x, y, side, side, angle, tuple(colour))
            if k % 2:
                sprite.kind = "shape"
            canvas.sprites.append(sprite)
        _write(canvas, "Sale 25% off!", int(random.integers(len(FONTS))), 20, 112, 28)
        canvases.append(canvas)
    pictures = renderer.render(pack_canvases(canvases), size)
    changed = augment(pictures, torch.Generator(renderer.device).manual_seed(0))
    return torch.cat([torch.cat(list(row), dim=2) for row in (pictures, changed)], dim=1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures are written")
    parser.add_argument("--atlas", type=Path, default=ATLAS_PATH)
    folder: Path = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    renderer = Renderer(parser.parse_args(arguments).atlas)
    sheets = {"shapes": shape_sheet(), "fonts": font_sheet()}
    for start in range(0, len(EMOJI_NAMES), 84):
        concepts = range(start, min(start + 84, len(EMOJI_NAMES)))
        sheets[f"emoji_{start:03d}"] = emoji_sheet(concepts)
    for name, (canvas, size) in sheets.items():
        save_picture(renderer.render(pack_canvases([canvas]), size)[0], folder / f"{name}.png")
        print(folder / f"{name}.png", flush=True)
    save_picture(mixed_pictures(renderer), folder / "mixed.png")


if __name__ == "__main__":
    main()
