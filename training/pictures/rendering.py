"""Draws batches of canvases as tensors, on a CPU or a GPU.

Each kind of thing has one big texture in which all its pictures lie below each other, each with
smaller copies of itself at its right (mip levels), everything with an empty border. A sprite is
drawn by computing, for every pixel of its canvas, where in the big texture it lies; what lies
outside the sprite is moved onto its empty border. So nothing is gathered, and sprites of a canvas
are drawn one after another over all canvases at once.

Invariants:
  1. Which sprites are drawn with which texture is known on the host: rendering waits for no device.
  2. Textures are premultiplied: [colours and coverage], or coverage alone, to be tinted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from training.pictures.lines import LINE_HEIGHT
from training.pictures.patches import augment, normalize_and_patch, normalize_and_patch_video
from training.samples import Canvas, Size

__all__ = [
    "PackedCanvases",
    "Renderer",
    "augment",
    "normalize_and_patch",
    "normalize_and_patch_video",
    "pack_canvases",
]

KINDS = {"shape": 1, "emoji": 2, "line": 3}  # 0: no sprite
_NUM_LEVELS = 4
_CANVASES_AT_ONCE = 512  # bounds the memory: about 1 kB for each of their pixels on the way


@dataclass(frozen=True, slots=True)
class PackedCanvases:
    """Canvases as arrays: B of them with at most K sprites each, L lines of text in all."""

    backgrounds: np.ndarray  # float32 [B, 7]: colour, other colour, angle
    sprites: np.ndarray  # float32 [B, K, 10]: kind, number, x, y, width, height, angle, colour
    lines: np.ndarray  # uint8 [L, 48, W]: empty at the right of the shorter ones
    line_widths: np.ndarray  # int32 [L]

    def __len__(self) -> int:
        return len(self.backgrounds)


def pack_canvases(canvases: list[Canvas]) -> PackedCanvases:
    num_sprites = max((len(canvas.sprites) for canvas in canvases), default=0)
    backgrounds = np.zeros((len(canvases), 7), np.float32)
    sprites = np.zeros((len(canvases), num_sprites, 10), np.float32)
    lines: list[np.ndarray] = []
    for n, canvas in enumerate(canvases):
        other = canvas.background if canvas.other_background is None else canvas.other_background
        backgrounds[n] = (*canvas.background, *other, canvas.gradient_angle)
        for k, sprite in enumerate(canvas.sprites):
            number = sprite.number + (len(lines) if sprite.kind == "line" else 0)
            place = (sprite.x, sprite.y, sprite.width, sprite.height, sprite.angle)
            sprites[n, k] = (KINDS[sprite.kind], number, *place, *sprite.colour)
        lines.extend(canvas.lines)
    widths = np.array([line.shape[1] for line in lines], np.int32)
    together = np.zeros((len(lines), LINE_HEIGHT, widths.max(initial=0)), np.uint8)
    for n, line in enumerate(lines):
        together[n, :, : line.shape[1]] = line
    return PackedCanvases(backgrounds, sprites, together, widths)


class _Texture:
    """Pictures of equal height below each other, with their mip levels."""

    def __init__(self, pictures: torch.Tensor) -> None:
        """`pictures` [number, channels, height, width], from 0 to 1."""
        number, channels, self.height, self.width = pictures.shape
        levels = [pictures]
        for _ in range(_NUM_LEVELS - 1):
            levels.append(functional.avg_pool2d(levels[-1], 2, ceil_mode=True))
        widths = [level.shape[3] + 2 for level in levels]
        self.row_height = self.height + 2
        sheet = pictures.new_zeros(number, channels, self.row_height, sum(widths))
        self.level_columns = [sum(widths[:n]) + 1 for n in range(_NUM_LEVELS)]
        for column, level in zip(self.level_columns, levels, strict=True):
            sheet[:, :, 1 : 1 + level.shape[2], column : column + level.shape[3]] = level
        self.sheet = sheet.transpose(0, 1).reshape(1, channels, -1, sheet.shape[3]).contiguous()

    def places(
        self, sprites: np.ndarray, widths: np.ndarray | float, scale: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Middles and sizes [n, 2] in the sheet's pixels of what is drawn for each sprite."""
        sizes = np.stack(np.broadcast_arrays(widths, float(self.height)), axis=-1)
        sizes = np.broadcast_to(sizes, (len(sprites), 2)).astype(np.float64)
        drawn = np.maximum(sprites[:, 4:6] * scale, 1e-3)
        # Bilinear sampling bears a little less than two texture pixels for one that is drawn.
        shrink = (sizes / drawn).max(axis=1) / 1.5
        levels = np.clip(np.ceil(np.log2(np.maximum(shrink, 1e-3))), 0, _NUM_LEVELS - 1)
        sizes = sizes / 2 ** levels[:, None]
        columns = np.array(self.level_columns)[levels.astype(np.int64)]
        rows = sprites[:, 1].astype(np.int64) * self.row_height + 1
        return np.stack([columns, rows], axis=-1) + sizes / 2, sizes


class Renderer:
    """Holds the textures on `device`; drawing changes nothing of it."""

    def __init__(self, atlas_path: Path | str, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        with np.load(atlas_path) as atlas:
            emoji = torch.from_numpy(atlas["emoji"]).to(self.device).float() / 255
            shapes = torch.from_numpy(atlas["shapes"]).to(self.device).float() / 255
        emoji = emoji.flatten(0, 1)  # number = concept * styles + style
        emoji = torch.cat([emoji[..., :3] * emoji[..., 3:], emoji[..., 3:]], dim=-1)
        self._shapes = _Texture(shapes[:, None])
        self._emoji = _Texture(emoji.permute(0, 3, 1, 2))

    @torch.no_grad()
    def render(self, packed: PackedCanvases, size: Size, *, scale: float = 1.0) -> torch.Tensor:
        """Float [B, 3, height * scale, width * scale] from 0 to 1."""
        parts = [
            self._render_part(packed, slice(start, start + _CANVASES_AT_ONCE), size, scale)
            for start in range(0, len(packed), _CANVASES_AT_ONCE)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _render_part(
        self, packed: PackedCanvases, part: slice, size: Size, scale: float
    ) -> torch.Tensor:
        height, width = round(size[0] * scale), round(size[1] * scale)
        x = (torch.arange(width, device=self.device) + 0.5) / scale
        y = (torch.arange(height, device=self.device)[:, None] + 0.5) / scale
        canvases = self._backgrounds(packed.backgrounds[part], x, y, size)
        sprites = packed.sprites[part]
        lines, packed_lines = self._lines(packed, sprites)
        for k in range(sprites.shape[1]):
            for kind, texture in ((1, self._shapes), (2, self._emoji), (3, lines)):
                chosen = np.flatnonzero(sprites[:, k, 0] == kind)
                if texture is None or not len(chosen):
                    continue
                drawn = sprites[chosen, k].copy()
                widths: np.ndarray | float = float(texture.width)
                if kind == KINDS["line"]:
                    widths = packed.line_widths[drawn[:, 1].astype(np.int64)]
                    drawn[:, 1] = np.searchsorted(packed_lines, drawn[:, 1])
                places = texture.places(drawn, widths, scale)
                self._draw(canvases, chosen, drawn, texture, places, x, y)
        return canvases

    def _send(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _backgrounds(
        self, backgrounds: np.ndarray, x: torch.Tensor, y: torch.Tensor, size: Size
    ) -> torch.Tensor:
        rows = self._send(backgrounds)[:, :, None, None]
        along_x, along_y = torch.cos(rows[:, 6:]), torch.sin(rows[:, 6:])
        reach = along_x.abs() * size[1] + along_y.abs() * size[0]
        share = 0.5 + ((x - size[1] / 2) * along_x + (y - size[0] / 2) * along_y) / reach
        return torch.lerp(rows[:, :3], rows[:, 3:6], share)

    def _lines(
        self, packed: PackedCanvases, sprites: np.ndarray
    ) -> tuple[_Texture | None, np.ndarray]:
        """The texture of the lines that these sprites show, and which those are, in order."""
        numbers = np.unique(sprites[sprites[:, :, 0] == KINDS["line"]][:, 1].astype(np.int64))
        if not len(numbers):
            return None, numbers
        return _Texture(self._send(packed.lines[numbers])[:, None].float() / 255), numbers

    def _draw(
        self,
        canvases: torch.Tensor,
        chosen: np.ndarray,
        sprites: np.ndarray,
        texture: _Texture,
        places: tuple[np.ndarray, np.ndarray],
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """Draws one sprite onto each of the chosen canvases."""
        sheet = texture.sheet
        across, down = sheet.shape[3], sheet.shape[2]
        middles, sizes = places
        cosines, sines = np.cos(sprites[:, 6]), np.sin(sprites[:, 6])
        per_pixel = sizes / np.maximum(sprites[:, 4:6], 1e-3)  # texture pixels
        limits = sizes / 2 + 0.5  # the middle of the empty border
        # From the canvas to the sprite's own axes, and on to the sheet from -1 to 1.
        columns = (
            sprites[:, 2:4].T,
            [cosines * per_pixel[:, 0] * 2 / across, sines * per_pixel[:, 0] * 2 / across],
            [-sines * per_pixel[:, 1] * 2 / down, cosines * per_pixel[:, 1] * 2 / down],
            [limits[:, 0] * 2 / across, limits[:, 1] * 2 / down],
            [middles[:, 0] * 2 / across - 1, middles[:, 1] * 2 / down - 1],
            sprites[:, 7:10].T,
        )
        values = self._send(np.concatenate(columns).astype(np.float32))[:, :, None, None]
        dx, dy = x - values[0], y - values[1]
        u = (values[2] * dx + values[3] * dy).clamp_(-values[6], values[6]).add_(values[8])
        v = (values[4] * dx + values[5] * dy).clamp_(-values[7], values[7]).add_(values[9])
        grid = torch.stack([u, v], dim=-1)
        found = functional.grid_sample(
            sheet.expand(len(chosen), -1, -1, -1), grid, align_corners=False
        )
        coverage = found[:, -1:]
        colours = found[:, :-1]
        if not colours.shape[1]:
            colours = values[10:13].transpose(0, 1) * coverage
        if len(chosen) == len(canvases):
            canvases.mul_(1 - coverage).add_(colours)
        else:
            rows = self._send(chosen)
            canvases[rows] = canvases[rows] * (1 - coverage) + colours
