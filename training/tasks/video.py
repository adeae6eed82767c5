"""Tasks about short videos: what moves, changes, comes or goes."""

from __future__ import annotations

import random as randomness
from collections.abc import Callable
from math import hypot

from training.samples import Canvas, Colour, Sample, Size, Split, Sprite, Turn, is_held_out
from training.tasks import wordings
from training.tasks.palette import COLOURS, make_canvas, shade_of
from training.tasks.scenes import (
    NUMBERS,
    SEEN_PAIRS,
    SHAPES,
    Pair,
    choose_pair,
    sentence,
    with_article,
)
from training.tasks.video_wordings import (
    COUNT_END,
    DIRECTION,
    FIRST,
    HAPPENS,
    IS_MOVING,
    LAST,
    MOVES_THERE,
    NEW_COLOR,
    OLD_COLOR,
    SIZE_CHANGE,
    TURNS,
)

Random = randomness.Random
NUM_FRAMES = 8
DIRECTIONS = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
    "up and to the left": (-0.75, -0.75),
    "up and to the right": (0.75, -0.75),
    "down and to the left": (-0.75, 0.75),
    "down and to the right": (0.75, 0.75),
}
_STRAIGHT = tuple(DIRECTIONS)[:4]
# A circle and a ring look the same when they turn; a square becomes a diamond.
_NOT_TURNED = frozenset(SHAPES.index(name) for name in ("circle", "ring", "square", "diamond"))


def _name(pair: Pair) -> str:
    return f"{COLOURS[pair[1]]} {SHAPES[pair[0]]}"


def _make_frames(random: Random, size: Size, colours: frozenset[int]) -> list[Canvas] | None:
    """Empty frames with one background."""
    first = make_canvas(random, colours, size)
    if first is None:
        return None
    return [first] + [
        Canvas(first.background, first.other_background, first.gradient_angle, list(first.sprites))
        for _ in range(NUM_FRAMES - 1)
    ]


def _put(
    canvas: Canvas, shape: int, x: float, y: float, size: float, angle: float, shade: Colour
) -> None:
    canvas.sprites.append(Sprite("shape", shape, x, y, size, size, angle, shade))


def _choose_moving(random: Random, split: Split, directions: tuple[str, ...]) -> tuple[Pair, str]:
    while True:
        pair = SEEN_PAIRS[int(random.random() * len(SEEN_PAIRS))]
        direction = directions[int(random.random() * len(directions))]
        if is_held_out("motion", _name(pair), direction) == (split == "test"):
            return pair, direction


def _draw_motion(random: Random, size: Size, pair: Pair, direction: str) -> list[Canvas]:
    height, width = size
    frames = _make_frames(random, size, frozenset((pair[1],))) or []
    chance = random.random
    side = 18 + chance() * 0.2 * min(size)
    across, down = DIRECTIONS[direction]
    room_x, room_y = width - 1.2 * side, height - 1.2 * side
    way_x = abs(across) * room_x * (0.5 + 0.5 * chance())
    way_y = abs(down) * room_y * (0.5 + 0.5 * chance())
    if across and down:
        way_y = way_x * room_y / room_x
    left = 0.6 * side + (room_x - way_x) * chance()
    top = 0.6 * side + (room_y - way_y) * chance()
    angle, shade = (chance() - 0.5) * 0.15, shade_of(random, pair[1])
    for number, canvas in enumerate(frames):
        part = number / (NUM_FRAMES - 1)
        x = left + way_x * (part if across > 0 else 1 - part)
        y = top + way_y * (part if down > 0 else 1 - part)
        _put(canvas, pair[0], x, y, side, angle, shade)
    return frames


def make_direction(random: Random, size: Size, split: Split) -> Sample:
    """Ask where a shape moves to."""
    directions = tuple(DIRECTIONS) if split == "train" and random.random() < 0.35 else _STRAIGHT
    pair, direction = _choose_moving(random, split, directions)
    frames = _draw_motion(random, size, pair, direction)
    shape = SHAPES[pair[0]]
    turns = [Turn(DIRECTION.ask(random, shape=shape), sentence(direction))]
    if split == "train":
        turns += _ask_about_motion(random, pair, direction)
        random.shuffle(turns)
    return Sample("direction", turns, video=frames)


def _ask_about_motion(random: Random, pair: Pair, direction: str) -> list[Turn]:
    shape, name = SHAPES[pair[0]], _name(pair)
    kind = int(random.random() * 5)
    if kind == 0:
        return [Turn(HAPPENS.ask(random), sentence(f"{with_article(name)} moves {direction}"))]
    if kind == 1:
        return [Turn(IS_MOVING.ask(random, shape=shape), "Yes.")]
    if kind == 2:
        asked = direction if random.random() < 0.5 else random.choice(_STRAIGHT)
        if asked != direction and asked in direction:  # "up" of "up and to the left"
            return []
        answer = "Yes." if asked == direction else "No."
        return [Turn(MOVES_THERE.ask(random, shape=shape, direction=asked), answer)]
    if kind == 3:
        return [Turn(wordings.COLOR_OF_IT.ask(random), sentence(COLOURS[pair[1]]))]
    return [Turn(wordings.SHAPE_OF_IT.ask(random), sentence(with_article(shape)))]


def _make_still(random: Random, size: Size, split: Split) -> Sample | None:
    pair = choose_pair(random, split)
    frames = _make_frames(random, size, frozenset((pair[1],)))
    side = 24 + random.random() * 40
    if frames is None or is_held_out("still", *pair) != (split == "test"):
        return None
    x = side * 0.6 + random.random() * (size[1] - side * 1.2)
    y = side * 0.6 + random.random() * (size[0] - side * 1.2)
    shade = shade_of(random, pair[1])
    for canvas in frames:
        _put(canvas, pair[0], x, y, side, 0.0, shade)
    shape = SHAPES[pair[0]]
    turns = [
        Turn(IS_MOVING.ask(random, shape=shape), "No."),
        Turn(DIRECTION.ask(random, shape=shape), "It does not move."),
        Turn(HAPPENS.ask(random), sentence(f"{with_article(_name(pair))} does not move")),
    ]
    return Sample("video", turns, video=frames)


def _make_change(random: Random, size: Size, split: Split) -> Sample | None:
    """A shape gets another colour."""
    shape, colour = choose_pair(random, split)
    other = int(random.random() * len(COLOURS))
    frames = _make_frames(random, size, frozenset((colour, other)))
    if frames is None or other == colour or (shape, other) not in SEEN_PAIRS:
        return None
    if is_held_out("change", shape, colour, other) != (split == "test"):
        return None
    side = 28 + random.random() * 50
    x, y = size[1] * (0.4 + 0.2 * random.random()), size[0] * (0.4 + 0.2 * random.random())
    change = 3 + int(random.random() * 3)
    shades = shade_of(random, colour), shade_of(random, other)
    for number, canvas in enumerate(frames):
        _put(canvas, shape, x, y, side, 0.0, shades[number >= change])
    name = SHAPES[shape]
    happens = f"the {name} turns from {COLOURS[colour]} to {COLOURS[other]}"
    turns = [
        Turn(NEW_COLOR.ask(random, shape=name), sentence(COLOURS[other])),
        Turn(OLD_COLOR.ask(random, shape=name), sentence(COLOURS[colour])),
        Turn(HAPPENS.ask(random), sentence(happens)),
    ]
    return Sample("video", turns, video=frames)


def _make_order(random: Random, size: Size, split: Split) -> Sample | None:
    """One thing after the other, each alone."""
    first, second = choose_pair(random, split), choose_pair(random, split)
    frames = _make_frames(random, size, frozenset((first[1], second[1])))
    if frames is None or first == second:
        return None
    if is_held_out("order", _name(first), _name(second)) != (split == "test"):
        return None
    change = 3 + int(random.random() * 3)
    places = [
        (pair, size[1] * (0.35 + 0.3 * random.random()), size[0] * (0.35 + 0.3 * random.random()))
        for pair in (first, second)
    ]
    side = 26 + random.random() * 36
    shades = [shade_of(random, pair[1]) for pair in (first, second)]
    for number, canvas in enumerate(frames):
        (shape, _), x, y = places[number >= change]
        _put(canvas, shape, x, y, side, 0.0, shades[number >= change])
    names = [with_article(_name(pair)) for pair in (first, second)]
    turns = [
        Turn(FIRST.ask(random), sentence(names[0])),
        Turn(LAST.ask(random), sentence(names[1])),
        Turn(HAPPENS.ask(random), sentence(f"first {names[0]}, then {names[1]}")),
    ]
    return Sample("video", turns, video=frames)


def _make_growth(random: Random, size: Size, split: Split) -> Sample | None:
    shape, colour = choose_pair(random, split)
    frames = _make_frames(random, size, frozenset((colour,)))
    if frames is None:
        return None
    small, large = 18 + random.random() * 10, 58 + random.random() * 30
    grows = random.random() < 0.5
    if is_held_out("growth", shape, colour, grows) != (split == "test"):
        return None
    x, y = size[1] * (0.45 + 0.1 * random.random()), size[0] * (0.45 + 0.1 * random.random())
    shade = shade_of(random, colour)
    for number, canvas in enumerate(frames):
        part = number / (NUM_FRAMES - 1)
        side = small + (large - small) * (part if grows else 1 - part)
        _put(canvas, shape, x, y, side, 0.0, shade)
    verb, name = ("grows" if grows else "shrinks"), SHAPES[shape]
    happens = f"{with_article(_name((shape, colour)))} {verb}"
    turns = [
        Turn(SIZE_CHANGE.ask(random, shape=name), f"It {verb}."),
        Turn(HAPPENS.ask(random), sentence(happens)),
        Turn(wordings.SHAPE_OF_IT.ask(random), sentence(with_article(name))),
    ]
    return Sample("video", turns, video=frames)


def _make_turning(random: Random, size: Size, split: Split) -> Sample | None:
    shape, colour = choose_pair(random, split)
    frames = _make_frames(random, size, frozenset((colour,)))
    if frames is None or shape in _NOT_TURNED:
        return None
    turns_it = random.random() < 0.6
    if is_held_out("turning", shape, colour, turns_it) != (split == "test"):
        return None
    way = (0.9 + random.random()) * (1 if random.random() < 0.5 else -1) if turns_it else 0.0
    start, side = random.random() - 0.5, 40 + random.random() * 25
    shade = shade_of(random, colour)
    for number, canvas in enumerate(frames):
        angle = start + way * number / (NUM_FRAMES - 1)
        _put(canvas, shape, size[1] / 2, size[0] / 2, side, angle, shade)
    name = SHAPES[shape]
    turns = [Turn(TURNS.ask(random, shape=name), "Yes." if turns_it else "No.")]
    if turns_it:
        happens = f"{with_article(_name((shape, colour)))} turns"
        turns.append(Turn(HAPPENS.ask(random), sentence(happens)))
    turns.append(Turn(wordings.COLOR_OF_IT.ask(random), sentence(COLOURS[colour])))
    return Sample("video", turns, video=frames)


def _make_arrivals(random: Random, size: Size, split: Split) -> Sample | None:
    """Things appear one after the other, and stay."""
    count = 1 + int(random.random() * 5)
    places: list[tuple[Pair, float, float]] = []
    for _ in range(12 * count):
        x = size[1] * (0.14 + 0.72 * random.random())
        y = size[0] * (0.14 + 0.72 * random.random())
        if len(places) < count and all(hypot(a - x, b - y) > 32 for _, a, b in places):
            places.append((choose_pair(random, split), x, y))
    frames = _make_frames(random, size, frozenset(pair[1] for pair, _, _ in places))
    if frames is None or len(places) < count:
        return None
    if is_held_out("arrivals", _name(places[0][0]), count) != (split == "test"):
        return None
    shades = [shade_of(random, pair[1]) for pair, _, _ in places]
    side = 16 + random.random() * 8
    for number, canvas in enumerate(frames):
        shown = min(count, 1 + number * count // (NUM_FRAMES - 1))
        for ((shape, _), x, y), shade in zip(places[:shown], shades, strict=False):
            _put(canvas, shape, x, y, side, 0.0, shade)
    turns = [Turn(COUNT_END.ask(random), sentence(NUMBERS[count]))]
    first = with_article(_name(places[0][0]))
    turns.append(Turn(FIRST.ask(random), sentence(first)))
    return Sample("video", turns, video=frames)


_KINDS: tuple[Callable[[Random, Size, Split], Sample | None], ...] = (
    *(_make_change, _make_order, _make_growth, _make_turning, _make_arrivals, _make_arrivals),
    *(_make_still, make_direction),
)


def make_video(random: Random, size: Size, split: Split) -> Sample:
    """All kinds of short videos; two or three questions each."""
    while True:
        kind = _KINDS[int(random.random() * len(_KINDS))]
        sample = kind(random, size, split)
        if sample is not None:
            random.shuffle(sample.turns)
            return sample
