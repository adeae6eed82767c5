"""Colours by name, and backgrounds on which things of these colours can be distinguished."""

from __future__ import annotations

import random as randomness
from math import hypot, pi

from training.samples import Canvas, Colour, Sprite

COLOURS = (
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
    "gray",
)
SQUARE = 1  # in the atlas of shapes

# What people call by each name: the colours of CSS, and of emoji and painting programs.
SHADES: tuple[tuple[Colour, ...], ...] = (
    ((0.90, 0.10, 0.12), (1.0, 0.0, 0.0), (0.80, 0.08, 0.12), (0.86, 0.18, 0.18)),
    ((0.98, 0.55, 0.06), (1.0, 0.65, 0.0), (1.0, 0.50, 0.0), (0.96, 0.60, 0.16)),
    ((0.98, 0.88, 0.10), (1.0, 1.0, 0.0), (1.0, 0.90, 0.08), (0.96, 0.92, 0.25)),
    ((0.12, 0.62, 0.22), (0.0, 0.50, 0.0), (0.10, 0.85, 0.15), (0.30, 0.70, 0.32)),
    ((0.12, 0.32, 0.88), (0.0, 0.0, 1.0), (0.15, 0.45, 0.90), (0.10, 0.15, 0.70)),
    ((0.50, 0.16, 0.68), (0.50, 0.0, 0.50), (0.58, 0.20, 0.80), (0.42, 0.12, 0.60)),
    ((0.98, 0.58, 0.75), (1.0, 0.753, 0.796), (1.0, 0.41, 0.71), (0.96, 0.50, 0.68)),
    ((0.48, 0.29, 0.13), (0.55, 0.27, 0.07), (0.42, 0.24, 0.12), (0.50, 0.33, 0.18)),
    ((0.04, 0.04, 0.04), (0.0, 0.0, 0.0), (0.08, 0.08, 0.09), (0.02, 0.02, 0.05)),
    ((0.98, 0.98, 0.98), (1.0, 1.0, 1.0), (0.96, 0.97, 0.98), (0.99, 0.98, 0.96)),
    ((0.50, 0.50, 0.50), (0.55, 0.56, 0.57), (0.46, 0.46, 0.47), (0.58, 0.58, 0.58)),
)
CONTRAST = 0.31  # least distance of a background from every shade of the things before it
JITTER = 0.025


def _distance(one: Colour, other: Colour) -> float:
    return hypot(one[0] - other[0], one[1] - other[1], one[2] - other[2])


def _make_backgrounds() -> tuple[Colour, ...]:
    levels = (0.04, 0.28, 0.52, 0.76, 0.97)
    return tuple((r, g, b) for r in levels for g in levels for b in levels)


_BACKGROUNDS = ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), *_make_backgrounds())
_FITTING = tuple(
    frozenset(
        number
        for number, background in enumerate(_BACKGROUNDS)
        if min(_distance(background, shade) for shade in shades) > CONTRAST
    )
    for shades in SHADES
)
_KNOWN: dict[frozenset[int], tuple[int, ...]] = {}


def fitting_backgrounds(colours: frozenset[int]) -> tuple[int, ...]:
    """The backgrounds that differ from all these colours; white first where it does."""
    found = _KNOWN.get(colours)
    if found is None:
        numbers = set(range(len(_BACKGROUNDS)))
        for colour in colours:
            numbers &= _FITTING[colour]
        found = _KNOWN[colours] = tuple(sorted(numbers))
    return found


def _luminance(colour: Colour) -> float:
    return 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2]


# Of each colour, the backgrounds on which thin letters of it can be read.
_READABLE = tuple(
    tuple(
        number
        for number, background in enumerate(_BACKGROUNDS)
        if min(abs(_luminance(background) - _luminance(shade)) for shade in shades) > 0.33
    )
    for shades in SHADES
)


def jittered(random: randomness.Random, colour: Colour) -> Colour:
    """Return a colour that looks the same as this one."""
    uniform = random.random
    red = colour[0] + (uniform() - 0.5) * 2 * JITTER
    green = colour[1] + (uniform() - 0.5) * 2 * JITTER
    blue = colour[2] + (uniform() - 0.5) * 2 * JITTER
    return (min(1.0, max(0.0, red)), min(1.0, max(0.0, green)), min(1.0, max(0.0, blue)))


def shade_of(random: randomness.Random, colour: int) -> Colour:
    shades = SHADES[colour]
    return jittered(random, shades[int(random.random() * len(shades))])


def name_of(colour: Colour) -> int:
    """The colour of the palette that is nearest to this one."""
    return min(
        range(len(SHADES)), key=lambda number: min(_distance(s, colour) for s in SHADES[number])
    )


def make_canvas(
    random: randomness.Random, colours: frozenset[int], size: tuple[int, int]
) -> Canvas | None:
    """A plain, shaded or two-tone background for things of these colours; None if there is none."""
    numbers = fitting_backgrounds(colours)
    return _make_canvas(random, numbers, size) if numbers else None


def make_text_canvas(random: randomness.Random, colour: int, size: tuple[int, int]) -> Canvas:
    """A background for letters of this colour."""
    return _make_canvas(random, _READABLE[colour], size)


def readable_colour(random: randomness.Random, colour: int) -> Colour:
    """A colour on which letters of this colour can be read."""
    numbers = _READABLE[colour]
    return jittered(random, _BACKGROUNDS[numbers[int(random.random() * len(numbers))]])


def _make_canvas(
    random: randomness.Random, numbers: tuple[int, ...], size: tuple[int, int]
) -> Canvas:
    chance = random.random()
    if chance < 0.3 and numbers[0] == 0:
        return Canvas(background=(1.0, 1.0, 1.0))
    background = jittered(random, _BACKGROUNDS[numbers[int(random.random() * len(numbers))]])
    if chance < 0.6:
        return Canvas(background=background)
    other = _second_tone(random, background, numbers)
    if other is None:
        return Canvas(background=background)
    angle = random.random() * 2 * pi
    if chance < 0.85:
        return Canvas(background=background, other_background=other, gradient_angle=angle)
    return Canvas(background=background, sprites=[_half(random, size, other)])


def _second_tone(
    random: randomness.Random, background: Colour, numbers: tuple[int, ...]
) -> Colour | None:
    """Another background near the first one, so that what lies between them also fits."""
    for _ in range(6):
        other = _BACKGROUNDS[numbers[int(random.random() * len(numbers))]]
        if 0.05 < _distance(background, other) < 0.45:
            return jittered(random, other)
    return None


def _half(random: randomness.Random, size: tuple[int, int], colour: Colour) -> Sprite:
    """A square so large that only one of its sides is seen."""
    height, width = size
    length = 4.0 * max(size)
    edge = 0.3 + 0.4 * random.random()
    if random.random() < 0.5:
        x, y = width * edge + length / 2, height / 2
    else:
        x, y = width / 2, height * edge + length / 2
    return Sprite("shape", SQUARE, x, y, length, length, 0.0, colour)


def is_background(sprite: Sprite, size: tuple[int, int]) -> bool:
    """Whether it is no thing but half of a two-tone background."""
    return sprite.width > 2 * max(size)
