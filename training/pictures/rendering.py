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

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from training.pictures.packing import KINDS, PackedCanvases, pack_canvases
from training.pictures.patches import augment, normalize_and_patch, normalize_and_patch_video
from training.samples import Size

__all__ = [
    "PackedCanvases",
    "Renderer",
    "augment",
    "normalize_and_patch",
    "normalize_and_patch_video",
    "pack_canvases",
]

_NUM_LEVELS = 4
_BORDER = 2
_CANVASES_AT_ONCE = 512  # bounds the memory: about 70 bytes for each of their pixels


class _Texture:
    """Pictures of equal height below each other, with their mip levels."""

    def __init__(self, pictures: torch.Tensor, widths: np.ndarray | None = None) -> None:
        """Take pictures [number, channels, height, width] from 0 to 1; some may be less wide."""
        number, channels, self.height, width = pictures.shape
        self.widths = np.full(number, width) if widths is None else widths
        levels = [pictures]
        for _ in range(_NUM_LEVELS - 1):
            levels.append(functional.avg_pool2d(levels[-1], 2, ceil_mode=True))
        steps = [level.shape[3] + 2 * _BORDER for level in levels]
        self.row_height = self.height + 2 * _BORDER
        sheet = pictures.new_zeros(number, channels, self.row_height, sum(steps))
        self.level_columns = [sum(steps[:n]) + _BORDER for n in range(_NUM_LEVELS)]
        for column, level in zip(self.level_columns, levels, strict=True):
            bottom, right = _BORDER + level.shape[2], column + level.shape[3]
            sheet[:, :, _BORDER:bottom, column:right] = level
        self.sheet = sheet.transpose(0, 1).reshape(1, channels, -1, sheet.shape[3]).contiguous()

    def mapping(self, sprites: np.ndarray, scale: float) -> np.ndarray:
        """Float32 [13, n]: for n sprites how a pixel of the canvas leads to one of the sheet.

        x and y of the sprite's middle | to the sheet's x: per dx, per dy | to its y: per dx, per dy
        | the farthest x and y from the middle in the sheet | that middle's x and y | the tint.
        The sheet reaches from -1 to 1.
        """
        numbers = sprites[:, 1].astype(np.int64)
        sizes = np.stack([self.widths[numbers], np.full(len(sprites), self.height)], axis=-1)
        drawn = np.maximum(sprites[:, 4:6], 1e-3)
        # Bilinear sampling bears a little less than two texture pixels for one that is drawn.
        shrink = (sizes / drawn).max(axis=1) / scale / 1.5
        levels = np.clip(np.ceil(np.log2(shrink) - 0.01), 0, _NUM_LEVELS - 1).astype(np.int64)
        sizes = sizes / 2 ** levels[:, None]
        columns = np.array(self.level_columns)[levels]
        rows = numbers * self.row_height + _BORDER
        whole = 2 / np.array([self.sheet.shape[3], self.sheet.shape[2]])
        middles = (np.stack([columns, rows], axis=-1) + sizes / 2) * whole - 1
        limits = (sizes / 2 + 1.5) * whole  # in the border, also where a size is no whole number
        across, down = (sizes / drawn * whole).T
        cosines, sines = np.cos(sprites[:, 6]), np.sin(sprites[:, 6])
        turns = [cosines * across, sines * across, -sines * down, cosines * down]
        parts = [sprites[:, 2:4].T, turns, limits.T, middles.T, sprites[:, 7:10].T]
        mapping: np.ndarray = np.concatenate(parts).astype(np.float32)
        return mapping


def _box(sprite: np.ndarray, scale: float) -> tuple[slice, slice]:
    """Rows and columns of the canvas that hold all of a sprite."""
    cosine, sine = abs(np.cos(sprite[6])), abs(np.sin(sprite[6]))
    x, y, width, height = sprite[2:6]
    halves = (sine * width + cosine * height) / 2, (cosine * width + sine * height) / 2
    margin = 2 + 0.1 * max(width, height)  # a pixel of the coarsest level, and rounding

    def around(middle: float, half: float) -> slice:
        low, high = (middle - half - margin) * scale, (middle + half + margin) * scale
        return slice(max(int(low), 0), max(int(high) + 1, 0))

    return around(y, halves[0]), around(x, halves[1])


class Renderer:
    """Holds the textures on `device`; drawing changes nothing of it."""

    def __init__(
        self,
        atlas_path: Path | str,
        device: torch.device | str = "cpu",
        *,
        emoji_path: Path | str | None = None,
    ) -> None:
        """Load the atlas, with the emoji of another file if `emoji_path` is given.

        A file such as `emoji_unseen.npz` has one style in place of all.
        """
        self.device = torch.device(device)
        with np.load(atlas_path) as atlas:
            shapes = torch.from_numpy(atlas["shapes"]).to(self.device).float() / 255
            num_styles = atlas["emoji"].shape[1]
        with np.load(emoji_path or atlas_path) as atlas:
            emoji = torch.from_numpy(atlas["emoji"]).to(self.device).float() / 255
        emoji = emoji.expand(-1, num_styles, -1, -1, -1).flatten(
            0, 1
        )  # number = concept * styles + style
        emoji = torch.cat([emoji[..., :3] * emoji[..., 3:], emoji[..., 3:]], dim=-1)
        self._shapes = _Texture(shapes[:, None])
        self._emoji = _Texture(emoji.permute(0, 3, 1, 2))
        self._one_by_one = self.device.type == "cpu"  # each in its own box: less to compute

    @torch.no_grad()
    def render(self, packed: PackedCanvases, size: Size, *, scale: float = 1.0) -> torch.Tensor:
        """Render canvases as floats [B, 3, height * scale, width * scale] from 0 to 1."""
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
        sprites = packed.sprites[part].copy()
        textures = {"shape": self._shapes, "emoji": self._emoji}
        if (sprites[:, :, 0] == KINDS["line"]).any():
            textures["line"] = self._lines(packed, sprites)
        for k in range(sprites.shape[1]):
            for kind, texture in textures.items():
                rows = np.flatnonzero(sprites[:, k, 0] == KINDS[kind])
                if len(rows):
                    self._draw_each(canvases, rows, sprites[rows, k], texture, x, y, scale)
        return canvases

    def _draw_each(
        self,
        canvases: torch.Tensor,
        rows: np.ndarray,
        sprites: np.ndarray,
        texture: _Texture,
        x: torch.Tensor,
        y: torch.Tensor,
        scale: float,
    ) -> None:
        """Draws the sprites onto the canvases of the rows, one onto each."""
        mapping = self._send(texture.mapping(sprites, scale))
        if self._one_by_one:
            for n, row in enumerate(rows):
                down, across = _box(sprites[n], scale)
                box = canvases[row : row + 1, :, down, across]
                _draw(box, None, mapping[:, n : n + 1], texture.sheet, x[across], y[down])
        else:
            chosen = None if len(rows) == len(canvases) else self._send(rows)
            _draw(canvases, chosen, mapping, texture.sheet, x, y)

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

    def _lines(self, packed: PackedCanvases, sprites: np.ndarray) -> _Texture:
        """Return the texture of the lines that these sprites show, and renumber the sprites."""
        shown = sprites[:, :, 0] == KINDS["line"]
        numbers, places = np.unique(sprites[shown][:, 1].astype(np.int64), return_inverse=True)
        sprites[shown, 1] = places
        coverage = self._send(packed.lines[numbers])[:, None].float() / 255
        return _Texture(coverage, packed.line_widths[numbers])


def _draw(
    canvases: torch.Tensor,
    rows: torch.Tensor | None,
    mapping: torch.Tensor,
    sheet: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Draws one sprite onto each canvas, or onto those of the `rows`."""
    values = mapping[:, :, None, None]
    dx, dy = x - values[0], y - values[1]
    u = (values[2] * dx + values[3] * dy).clamp_(-values[6], values[6]).add_(values[8])
    v = (values[4] * dx + values[5] * dy).clamp_(-values[7], values[7]).add_(values[9])
    grid = torch.stack([u, v], dim=-1)
    sheets = sheet.expand(len(grid), -1, -1, -1)
    found = functional.grid_sample(sheets, grid, align_corners=False)
    colours, coverage = found[:, :-1], found[:, -1:]
    if not colours.shape[1]:
        colours = values[10:13].transpose(0, 1) * coverage
    if rows is None:
        canvases.mul_(1 - coverage).add_(colours)
    else:
        canvases[rows] = canvases[rows] * (1 - coverage) + colours
