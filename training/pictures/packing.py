"""Canvases as a few arrays, to be sent between processes; free of torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.pictures.lines import LINE_HEIGHT
from training.samples import Canvas, Line

KINDS = {"shape": 1, "emoji": 2, "line": 3}  # 0: no sprite


@dataclass(frozen=True, slots=True)
class PackedCanvases:
    """Canvases as arrays: B of them with at most K sprites each, L lines of text in all."""

    backgrounds: np.ndarray  # float32 [B, 7]: colour, other colour, angle
    sprites: np.ndarray  # float32 [B, K, 10]: kind, number, x, y, width, height, angle, colour
    lines: np.ndarray  # uint8 [L, 48, W]: empty at the right of the shorter ones
    line_widths: np.ndarray  # int32 [L]
    letters: np.ndarray  # uint8 [L, W]: number of the letter in each column, 0 between them

    def __len__(self) -> int:
        return len(self.backgrounds)


def pack_canvases(canvases: list[Canvas]) -> PackedCanvases:
    num_sprites = max((len(canvas.sprites) for canvas in canvases), default=0)
    backgrounds = np.zeros((len(canvases), 7), np.float32)
    sprites = np.zeros((len(canvases), num_sprites, 10), np.float32)
    lines: list[Line] = []
    for n, canvas in enumerate(canvases):
        other = canvas.background if canvas.other_background is None else canvas.other_background
        backgrounds[n] = (*canvas.background, *other, canvas.gradient_angle)
        for k, sprite in enumerate(canvas.sprites):
            number = sprite.number + (len(lines) if sprite.kind == "line" else 0)
            place = (sprite.x, sprite.y, sprite.width, sprite.height, sprite.angle)
            sprites[n, k] = (KINDS[sprite.kind], number, *place, *sprite.colour)
        lines.extend(canvas.lines)
    widths = np.array([line.width for line in lines], np.int32)
    together = np.zeros((len(lines), LINE_HEIGHT, widths.max(initial=0)), np.uint8)
    letters = np.zeros((len(lines), together.shape[2]), np.uint8)
    for n, line in enumerate(lines):
        together[n, :, : line.width] = line.coverage
        letters[n, : line.width] = line.letters
    return PackedCanvases(backgrounds, sprites, together, widths, letters)
