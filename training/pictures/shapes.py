"""The shapes, drawn as coverage that fills its square."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SHAPE_NAMES = (
    "circle",
    "square",
    "triangle",
    "star",
    "heart",
    "diamond",
    "cross",
    "hexagon",
    "ring",
    "crescent",
)
SHAPE_SIZE = 128
_SUPERSAMPLING = 8

Field = np.ndarray  # float, x or y of every sample from -1 to 1 (y downwards)


def _inside_polygon(points: list[tuple[float, float]], x: Field, y: Field) -> np.ndarray:
    """Find samples inside a polygon by counting the edges to the right of each."""
    inside = np.zeros(x.shape, bool)
    for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1], strict=True):
        if y0 != y1:
            crosses = (y0 > y) != (y1 > y)
            inside ^= crosses & (x < x0 + (y - y0) * (x1 - x0) / (y1 - y0))
    return inside


def _fitted(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretch a polygon so that it touches all four sides of the square."""
    corners = np.array(points)
    low, high = corners.min(axis=0), corners.max(axis=0)
    return [(float(x), float(y)) for x, y in 2 * (corners - low) / (high - low) - 1]


def _around(number: int, *radii: float) -> list[tuple[float, float]]:
    """Points at equal angles, the first one on top, at radii that take turns."""
    angles = 2 * np.pi * np.arange(number) / number
    return [
        (
            float(np.sin(angle)) * radii[n % len(radii)],
            -float(np.cos(angle)) * radii[n % len(radii)],
        )
        for n, angle in enumerate(angles)
    ]


def _heart() -> list[tuple[float, float]]:
    t = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    x = np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    return _fitted(list(zip(x.tolist(), y.tolist(), strict=True)))


def _crescent(x: Field, y: Field) -> np.ndarray:
    # From the disc's left side to the points, where the circles meet at 0.5361, is the square.
    x = 0.76805 * x - 0.23195
    inside: np.ndarray = (x**2 + y**2 < 1) & ((x - 0.45) ** 2 + y**2 > 0.72)
    return inside


_INSIDE: dict[str, Callable[[Field, Field], np.ndarray]] = {
    "circle": lambda x, y: x**2 + y**2 < 1,
    "square": lambda x, _: np.ones(x.shape, bool),
    "triangle": lambda x, y: _inside_polygon([(-1, 1), (0, -1), (1, 1)], x, y),
    "star": lambda x, y: _inside_polygon(_fitted(_around(10, 1, 0.4)), x, y),
    "heart": lambda x, y: _inside_polygon(_heart(), x, y),
    "diamond": lambda x, y: abs(x) + abs(y) < 1,
    "cross": lambda x, y: (abs(x) < 0.32) | (abs(y) < 0.32),
    "hexagon": lambda x, y: _inside_polygon(_fitted(_around(6, 1)), x, y),
    "ring": lambda x, y: (x**2 + y**2 < 1) & (x**2 + y**2 > 0.6**2),
    "crescent": _crescent,
}


def draw_shapes() -> np.ndarray:
    """Coverage uint8 [shape, 128, 128], in the order of `SHAPE_NAMES`."""
    samples = SHAPE_SIZE * _SUPERSAMPLING
    along = (np.arange(samples) + 0.5) / samples * 2 - 1
    x, y = np.meshgrid(along, along)
    blocks = (SHAPE_SIZE, _SUPERSAMPLING, SHAPE_SIZE, _SUPERSAMPLING)
    coverage = [_INSIDE[name](x, y).reshape(blocks).mean(axis=(1, 3)) for name in SHAPE_NAMES]
    return np.round(np.stack(coverage) * 255).astype(np.uint8)
