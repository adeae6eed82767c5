"""Coloured shapes on a canvas: where they are, what they are called, which are held out."""

from __future__ import annotations

import random as randomness
from dataclasses import dataclass, field
from math import hypot

from training.pictures.shapes import SHAPE_NAMES
from training.samples import Canvas, Size, Split, Sprite, is_held_out
from training.tasks.palette import COLOURS, make_canvas, shade_of

SHAPES = SHAPE_NAMES
SQUARE, DIAMOND = SHAPES.index("square"), SHAPES.index("diamond")
PLURALS = tuple("crosses" if shape == "cross" else shape + "s" for shape in SHAPES)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
CELLS = (
    "top left",
    "top",
    "top right",
    "left",
    "center",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
Pair = tuple[int, int]  # a shape and a colour

# Never seen in training: a purple heart, a green star, an orange hexagon, a white cross.
UNSEEN_PAIRS: tuple[Pair, ...] = ((4, 5), (3, 3), (7, 1), (6, 9))

_ALL_PAIRS = tuple((shape, colour) for shape in range(10) for colour in range(11))
SEEN_PAIRS = tuple(pair for pair in _ALL_PAIRS if pair not in UNSEEN_PAIRS)
CELLS_OF: dict[Split, dict[Pair, tuple[int, ...]]] = {
    split: {
        (shape, colour): tuple(
            cell
            for cell in range(9)
            if is_held_out("cell", SHAPES[shape], COLOURS[colour], cell) == (split == "test")
        )
        for shape, colour in _ALL_PAIRS
    }
    for split in ("train", "test")
}
PAIRS_OF: dict[Split, tuple[Pair, ...]] = {
    "train": SEEN_PAIRS,
    "test": tuple(pair for pair in SEEN_PAIRS if CELLS_OF["test"][pair]),
}
ALL_CELLS = tuple(range(9))
_HELD_OUT_COUNTS = frozenset(
    (shape, colour, count)
    for shape, colour in _ALL_PAIRS
    for count in range(10)
    if is_held_out("count", SHAPES[shape], COLOURS[colour], count)
)


def is_held_out_count(shape: int, colour: int, count: int) -> bool:
    return (shape, colour, count) in _HELD_OUT_COUNTS


@dataclass(slots=True)
class Thing:
    shape: int
    colour: int
    x: float
    y: float
    size: float
    cell: int  # of the three by three cells, the one in which its centre lies

    @property
    def name(self) -> str:
        return f"{COLOURS[self.colour]} {SHAPES[self.shape]}"


@dataclass(slots=True)
class Scene:
    height: int
    width: int
    things: list[Thing] = field(default_factory=list)

    def find_room(
        self,
        random: randomness.Random,
        cells: tuple[int, ...],
        sizes: tuple[float, float],
        is_inner: bool,
    ) -> tuple[float, float, float, int] | None:
        """x, y, size and cell for one thing more in one of these cells; None if there is none."""
        chance = random.random
        low, high = sizes
        margin = 0.16 if is_inner else 0.0
        for _ in range(8):
            cell = cells[int(chance() * len(cells))]
            row, column = divmod(cell, 3)
            x = (column + margin + chance() * (1 - 2 * margin)) * self.width / 3
            y = (row + margin + chance() * (1 - 2 * margin)) * self.height / 3
            limit = min(x, y, self.width - x, self.height - y) / 0.58
            for other in self.things:
                away = hypot(other.x - x, other.y - y) - 3.0
                limit = min(limit, away / 0.64 - other.size)
            if limit >= low:
                return x, y, low + (min(high, limit) - low) * chance(), cell
        return None

    def add(
        self,
        random: randomness.Random,
        pair: Pair,
        cells: tuple[int, ...],
        *,
        sizes: tuple[float, float] = (24.0, 90.0),
        is_inner: bool = True,
    ) -> bool:
        """Put a thing into one of these cells where no other is; False if there is no room."""
        room = self.find_room(random, cells, sizes, is_inner)
        if room is not None:
            self.things.append(Thing(pair[0], pair[1], *room))
        return room is not None

    def is_well_inside(self, thing: Thing) -> bool:
        """Return whether the thing is clearly in one of the nine cells."""
        x = thing.x * 3 / self.width % 1.0
        y = thing.y * 3 / self.height % 1.0
        return 0.15 < x < 0.85 and 0.15 < y < 0.85

    def with_shape(self, shape: int) -> list[Thing]:
        return [thing for thing in self.things if thing.shape == shape]

    def with_colour(self, colour: int) -> list[Thing]:
        return [thing for thing in self.things if thing.colour == colour]

    def with_pair(self, shape: int, colour: int) -> list[Thing]:
        return [t for t in self.things if t.shape == shape and t.colour == colour]

    def draw(self, random: randomness.Random) -> Canvas | None:
        """The canvas; None where no background differs from all of the things."""
        colours = frozenset([thing.colour for thing in self.things])
        canvas = make_canvas(random, colours, (self.height, self.width))
        if canvas is None:
            return None
        for thing in self.things:
            angle = 0.0 if random.random() < 0.4 else random.random() - 0.5
            angle *= 0.15 if thing.shape in (SQUARE, DIAMOND) else 0.5  # a turn makes one the other
            shade = shade_of(random, thing.colour)
            width = size = thing.size
            if thing.shape == DIAMOND and random.random() < 0.6:
                width *= 0.65 + 0.2 * random.random()
            canvas.sprites.append(
                Sprite("shape", thing.shape, thing.x, thing.y, width, size, angle, shade)
            )
        return canvas


def choose_pair(random: randomness.Random, split: Split) -> Pair:
    pairs = PAIRS_OF[split]
    return pairs[int(random.random() * len(pairs))]


def make_things(
    random: randomness.Random,
    size: Size,
    split: Split,
    count: int,
    *,
    are_distinct: bool = True,
    sizes: tuple[float, float] = (24.0, 90.0),
) -> Scene:
    """A scene of so many things (fewer where there is no room) in cells of this split."""
    scene = Scene(size[0], size[1])
    is_inner = split == "test" or random.random() < 0.75
    cells = CELLS_OF[split]
    seen: set[Pair] = set()
    while len(scene.things) < count:
        pair = choose_pair(random, split)
        if are_distinct and pair in seen:
            continue
        seen.add(pair)
        if not scene.add(random, pair, cells[pair], sizes=sizes, is_inner=is_inner):
            break
    return scene


def with_article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def relation_of(one: Thing, other: Thing) -> str | None:
    """Where the first is, seen from the second; None unless one axis clearly dominates."""
    across, down = one.x - other.x, one.y - other.y
    reach = 0.4 * (one.size + other.size)
    if abs(across) > 1.8 * abs(down) and abs(across) > reach:
        return "left" if across < 0 else "right"
    if abs(down) > 1.8 * abs(across) and abs(down) > reach:
        return "above" if down < 0 else "below"
    return None


def is_held_out_relation(one: Thing, other: Thing, relation: str) -> bool:
    """Return whether a relation is held out, equally for "A left of B" and "B right of A"."""
    if relation in ("right", "below"):
        one, other = other, one
        relation = "left" if relation == "right" else "above"
    return is_held_out("relation", one.name, other.name, relation)
