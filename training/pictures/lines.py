"""Lines of text, made by pasting glyphs that were drawn once.

A line's box is 48 pixels high for letters of 36 pixels; `width / LINE_HEIGHT` of the array is what
a sprite's width and height should keep to. No kerning.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from training.samples import Line

ATLAS_PATH = Path(__file__).parents[2] / "build" / "training" / "pictures.npz"

LINE_HEIGHT = 48
FONT_SIZE = 36
BASELINE = 35  # row of a line that the letters stand on
CELL_WIDTH = 64  # of a glyph in the atlas
CELL_ORIGIN = 8  # column of a cell where the pen stands: some glyphs reach to its left
MARGIN = 2  # empty columns on both sides of a line

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,!?-$%:+="

# Package and weight of each font number; the last family is for tests only.
FONTS: tuple[tuple[str, int], ...] = (
    ("arimo", 400),
    ("arimo", 700),
    ("inter", 400),
    ("inter", 700),
    ("open-sans", 400),
    ("open-sans", 700),
    ("roboto-condensed", 400),
    ("roboto-condensed", 700),
    ("nunito", 400),
    ("nunito", 700),
    ("tinos", 400),
    ("tinos", 700),
    ("merriweather", 400),
    ("merriweather", 700),
    ("roboto-slab", 400),
    ("roboto-slab", 700),
    ("cousine", 400),
    ("cousine", 700),
    ("jetbrains-mono", 400),
    ("jetbrains-mono", 700),
    ("comic-neue", 400),
    ("comic-neue", 700),
    ("patrick-hand", 400),
    ("fira-sans", 400),
    ("fira-sans", 700),
)
HELD_OUT_FONT = "fira-sans"
TRAIN_FONTS = tuple(n for n, (family, _) in enumerate(FONTS) if family != HELD_OUT_FONT)
HELD_OUT_FONTS = tuple(n for n, (family, _) in enumerate(FONTS) if family == HELD_OUT_FONT)


@dataclass(frozen=True, slots=True)
class _Glyph:
    coverage: np.ndarray  # uint8 [48, columns with ink]
    left: int  # of the ink, from the pen
    advance: float


@cache
def _glyphs(path: Path) -> list[dict[str, _Glyph]]:
    with np.load(path) as atlas:
        cells, advances = atlas["glyphs"], atlas["advances"]
    fonts = []
    for font in range(len(FONTS)):
        glyphs = {" ": _Glyph(np.zeros((LINE_HEIGHT, 0), np.uint8), 0, float(advances[font, -1]))}
        for n, character in enumerate(CHARACTERS):
            ink = np.flatnonzero(cells[font, n].any(axis=0))
            coverage = np.ascontiguousarray(cells[font, n][:, ink[0] : ink[-1] + 1])
            left = int(ink[0]) - CELL_ORIGIN
            glyphs[character] = _Glyph(coverage, left, float(advances[font, n]))
        fonts.append(glyphs)
    return fonts


def make_line(
    text: str, font_number: int, *, spacing: float = 0.0, path: Path = ATLAS_PATH
) -> Line:
    """Draw a text 48 pixels high, with `spacing` more pixels between its letters.

    The letters are those of `CHARACTERS` and the space; others raise `KeyError`.
    """
    font = _glyphs(path)[font_number]
    glyphs = [font[character] for character in text]
    pen = 0.0
    starts = []
    for glyph in glyphs:
        starts.append(round(pen) + glyph.left)
        pen += glyph.advance + spacing
    first = min(starts, default=0)
    end = max(start + glyph.coverage.shape[1] for start, glyph in zip(starts, glyphs, strict=True))
    line = np.zeros((LINE_HEIGHT, end - first + 2 * MARGIN), np.uint8)
    letters = np.zeros(line.shape[1], np.uint8)
    for start, glyph, character in zip(starts, glyphs, text, strict=True):
        column = start - first + MARGIN
        place = line[:, column : column + glyph.coverage.shape[1]]
        np.maximum(place, glyph.coverage, out=place)
        letters[column : column + place.shape[1]] = CHARACTERS.find(character) + 1
    return Line(line, letters)
