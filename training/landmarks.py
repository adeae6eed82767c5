"""What stands in each token of a picture, known because the picture was made."""

from __future__ import annotations

import numpy as np

from training.architecture import UNIT
from training.pictures.emoji_names import EMOJI_NAMES
from training.pictures.lines import CHARACTERS
from training.pictures.packing import KINDS, PackedCanvases
from training.pictures.shapes import SHAPE_NAMES
from training.tasks.emoji import NUM_STYLES
from training.tasks.palette import SHADES

SLOTS = (2, 4)  # rows and columns of places in a token at which a letter is looked for
# How many values each landmark of a token has; zero means nothing.
NUM_VALUES = (
    1 + len(SHAPE_NAMES) + len(EMOJI_NAMES),
    1 + len(SHADES),
    2,  # whether the middle of a thing is here
    *([1 + len(CHARACTERS)] * (SLOTS[0] * SLOTS[1])),
)
MAX_THING = 400.0  # pixels, more than any picture has; larger ones are half of a ground
MAX_COUNT = 10
_SHADES = np.array([shade for shades in SHADES for shade in shades])
_COLOURS = np.repeat(np.arange(len(SHADES)), [len(shades) for shades in SHADES])


def find_landmarks(packed: PackedCanvases, grid: tuple[int, int]) -> np.ndarray:
    """int16 [B, rows * columns, 11]: thing, colour, middle, and the letters at eight places.

    Things fill their boxes; later ones cover earlier ones.
    """
    rows, columns = grid
    found = np.zeros((len(packed), rows * columns, len(NUM_VALUES)), np.int16)
    middles = _places(grid, (1, 1))
    slots = _places(grid, SLOTS)
    has_emoji = (packed.sprites[:, :, 0] == KINDS["emoji"]).any(axis=1)
    for k in range(packed.sprites.shape[1]):
        sprites = packed.sprites[:, k]
        kinds, numbers = sprites[:, 0].astype(int), sprites[:, 1].astype(int)
        is_shape = (kinds == KINDS["shape"]) & ~has_emoji & (sprites[:, 4] < MAX_THING)
        is_line = kinds == KINDS["line"]
        things = np.where(is_shape, 1 + numbers, 1 + len(SHAPE_NAMES) + numbers // NUM_STYLES)
        things = np.where(is_shape | (kinds == KINDS["emoji"]), things, 0)
        colours = np.where(is_shape | is_line, _name_colours(sprites[:, 7:10]), 0)
        u, v = _turn(middles, sprites)
        inside = (np.abs(u) <= 0.5) & (np.abs(v) <= 0.5)  # [B, tokens]
        at = _tokens_of(sprites[:, 2:4], grid)
        shown = np.flatnonzero(things)
        inside[shown, at[shown]] = True
        inside &= (things > 0)[:, None] | is_line[:, None]
        found[..., 0] = np.where(inside, things[:, None], found[..., 0])
        found[..., 1] = np.where(inside, colours[:, None], found[..., 1])
        found[shown, at[shown], 2] = 1
        _find_letters(found, packed, np.flatnonzero(is_line), numbers, _turn(slots, sprites))
    return found


def count_so_far(sprites: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return how many like things came before the middle of each, in the order of tokens.

    int16 [B, rows * columns, 4]: counts of the same shape and colour, of the same shape, of the
    same colour, and of all things. Tokens that are no middle have zeros.
    """
    found = np.zeros((len(sprites), grid[0] * grid[1], 4), np.int16)
    kinds = sprites[:, :, 0].astype(int)
    is_thing = (kinds == KINDS["shape"]) & (sprites[:, :, 4] < MAX_THING)
    is_thing &= ~((kinds != KINDS["shape"]) & (kinds > 0)).any(axis=1)[:, None]
    for row in np.flatnonzero(is_thing.any(axis=1)):
        things = sprites[row, is_thing[row]]
        at = _tokens_of(things[:, 2:4], grid)
        order = np.argsort(at, kind="stable")
        shapes, colours = things[order, 1], _name_colours(things[order, 7:10])
        same_shape, same_colour = shapes[:, None] == shapes, colours[:, None] == colours
        before = np.tri(len(things), dtype=bool)
        for n, same in enumerate((same_shape & same_colour, same_shape, same_colour, before)):
            found[row, at[order], n] = np.minimum((same & before).sum(axis=1), MAX_COUNT)
    return found


def _find_letters(
    found: np.ndarray,
    packed: PackedCanvases,
    rows: np.ndarray,
    numbers: np.ndarray,
    places: tuple[np.ndarray, np.ndarray],
) -> None:
    if not len(rows):
        return
    u, v = (part[rows] for part in places)  # [n, tokens * slots]
    lines = numbers[rows]
    inside = (np.abs(u) < 0.5) & (np.abs(v) <= 0.5)
    across = ((u + 0.5) * packed.line_widths[lines][:, None]).astype(int)
    letters = packed.letters[lines[:, None], np.where(inside, across, 0)] * inside
    letters = letters.reshape(len(rows), found.shape[1], -1)
    found[rows, :, 3:] = np.where(letters > 0, letters, found[rows, :, 3:])


def _places(grid: tuple[int, int], slots: tuple[int, int]) -> np.ndarray:
    """x and y [2, tokens * slots] of places that lie evenly in each token."""
    y = (np.arange(grid[0] * slots[0]) + 0.5) * UNIT / slots[0]
    x = (np.arange(grid[1] * slots[1]) + 0.5) * UNIT / slots[1]
    both = np.stack(np.broadcast_arrays(x[None], y[:, None]))
    split = both.reshape(2, grid[0], slots[0], grid[1], slots[1]).transpose(0, 1, 3, 2, 4)
    places: np.ndarray = split.reshape(2, -1)
    return places


def _turn(places: np.ndarray, sprites: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where places lie in each sprite, from -0.5 to 0.5 inside it."""
    dx, dy = places[0] - sprites[:, 2:3], places[1] - sprites[:, 3:4]
    cosine, sine = np.cos(sprites[:, 6:7]), np.sin(sprites[:, 6:7])
    width, height = (np.maximum(sprites[:, n : n + 1], 1e-3) for n in (4, 5))
    return (cosine * dx + sine * dy) / width, (cosine * dy - sine * dx) / height


def _tokens_of(places: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    columns = np.clip(places[:, 0] // UNIT, 0, grid[1] - 1)
    rows = np.clip(places[:, 1] // UNIT, 0, grid[0] - 1)
    tokens: np.ndarray = (rows * grid[1] + columns).astype(int)
    return tokens


def _name_colours(colours: np.ndarray) -> np.ndarray:
    distances = np.square(colours[:, None] - _SHADES).sum(-1)
    names: np.ndarray = 1 + _COLOURS[distances.argmin(1)]
    return names
