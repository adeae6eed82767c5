"""Tasks about coloured shapes."""

from __future__ import annotations

import random as randomness
from collections.abc import Callable

import numpy as np

from training.samples import Canvas, Line, Sample, Size, Split, Sprite, Turn
from training.tasks import wordings
from training.tasks.palette import COLOURS, make_canvas, shade_of
from training.tasks.scenes import (
    ALL_CELLS,
    CELLS_OF,
    NUMBERS,
    PLURALS,
    SEEN_PAIRS,
    SHAPES,
    UNSEEN_PAIRS,
    Scene,
    choose_pair,
    is_held_out_count,
    make_things,
    sentence,
)
from training.tasks.shape_questions import (
    ask_absent,
    ask_at_position,
    ask_biggest,
    ask_color,
    ask_count,
    ask_exists,
    ask_is_color,
    ask_position,
    ask_relation,
    ask_same_color,
    ask_shape,
    ask_what,
)
from training.tasks.text import ask_fact

Random = randomness.Random
Ask = Callable[[Random, Scene, Split], Turn | None]

_KINDS: tuple[Ask, ...] = (
    ask_what,
    ask_color,
    ask_shape,
    ask_position,
    ask_at_position,
    ask_count,
    ask_relation,
    ask_exists,
    ask_biggest,
    ask_same_color,
    ask_is_color,
    ask_absent,
)
_WEIGHTS = (1.2, 1.2, 1.0, 1.6, 1.0, 1.4, 2.2, 1.2, 0.6, 0.6, 0.5, 0.9)
_CUMULATIVE = tuple(float(total) for total in np.cumsum(_WEIGHTS))


def _ask(
    random: Random, scene: Scene, split: Split, kinds: tuple[Ask, ...], count: int
) -> list[Turn]:
    """Return up to so many turns of these kinds about the scene."""
    turns: list[Turn] = []
    asked: set[str] = set()
    for _ in range(4 * count + 6 if count else 0):
        if kinds is _KINDS:
            kind = random.choices(_KINDS, cum_weights=_CUMULATIVE)[0]
        else:
            kind = kinds[int(random.random() * len(kinds))]
        turn = kind(random, scene, split)
        if turn is not None and turn.question not in asked:
            asked.add(turn.question)
            turns.append(turn)
            if len(turns) == count:
                break
    return turns


def ask_all_kinds(random: Random, scene: Scene, split: Split, count: int) -> list[Turn]:
    return _ask(random, scene, split, _KINDS, count)


def _converse(
    random: Random, task: str, scene: Scene, split: Split, kinds: tuple[Ask, ...], count: int
) -> Sample | None:
    """A conversation about the scene; None if it allows no question, or no background."""
    turns = _ask(random, scene, split, kinds, count) if scene.things else []
    canvas = scene.draw(random) if turns else None
    return None if canvas is None else Sample(task, turns, picture=canvas)


def make_shape_color(random: Random, size: Size, split: Split) -> Sample:
    """What one thing is, or which colour or shape one of a few has."""
    return _make_shape_color(random, size, split, "shape_color", ())


def make_unseen_pairs(random: Random, size: Size, _: Split) -> Sample:
    """The same for shapes that never had this colour in training."""
    return _make_shape_color(random, size, "test", "unseen_pairs", UNSEEN_PAIRS)


def _make_shape_color(
    random: Random, size: Size, split: Split, task: str, pairs: tuple[tuple[int, int], ...]
) -> Sample:
    while True:
        scene = Scene(*size)
        pair = random.choice(pairs) if pairs else choose_pair(random, split)
        cells = ALL_CELLS if pairs else CELLS_OF[split][pair]
        largest = 0.8 * min(size) if random.random() < 0.4 else 90.0
        if not scene.add(random, pair, cells, sizes=(24.0, largest), is_inner=False):
            continue
        sample = _converse(
            random, task, scene, split, (ask_what, ask_color, ask_shape), _num_turns(random, split)
        )
        if sample is not None:
            return sample


def _num_turns(random: Random, split: Split) -> int:
    return 1 if split == "test" else 2 + int(random.random() * 3)


def make_position(random: Random, size: Size, split: Split) -> Sample:
    """Where a thing is, or what is at a place."""
    while True:
        scene = make_things(random, size, split, 1 + int(random.random() * 4))
        sample = _converse(
            random,
            "position",
            scene,
            split,
            (ask_position, ask_position, ask_at_position),
            _num_turns(random, split),
        )
        if sample is not None:
            return sample


def make_relation(random: Random, size: Size, split: Split) -> Sample:
    """How two things lie to each other."""
    while True:
        count = 2 + int(random.random() ** 2 * 3)
        scene = make_things(random, size, "train", count, sizes=(24.0, 70.0))
        sample = _converse(
            random, "relation", scene, split, (ask_relation,), _num_turns(random, split)
        )
        if sample is not None:
            return sample


def make_count(random: Random, size: Size, split: Split) -> Sample:
    """How many there are: 0 to 5, in training up to 9."""
    while True:
        made = _make_countable(random, size, split)
        if made is None:
            continue
        scene, shape, colour, count = made
        if split == "train":
            sample = _converse(
                random, "count", scene, split, (ask_count,), _num_turns(random, split)
            )
            if sample is not None:
                return sample
            continue
        canvas = scene.draw(random)
        if canvas is None:
            continue
        names = [f"{COLOURS[colour]} {PLURALS[shape]}"]
        if count:
            names += [PLURALS[shape], f"{COLOURS[colour]} things"]
        question = wordings.COUNT.ask(random, things=random.choice(names))
        return Sample("count", [Turn(question, sentence(NUMBERS[count]))], picture=canvas)


def _make_countable(random: Random, size: Size, split: Split) -> tuple[Scene, int, int, int] | None:
    """So many things of one kind among others that share neither its shape nor its colour."""
    is_test = split == "test"
    shape, colour = SEEN_PAIRS[int(random.random() * len(SEEN_PAIRS))]
    count = int(random.random() * 6)
    if not is_test and random.random() < 0.15:
        count = 6 + int(random.random() * 4)
    if is_held_out_count(shape, colour, count) != is_test:
        return None
    scene = Scene(*size)
    cells = CELLS_OF["train"]
    sizes = (20.0, 64.0 if count < 6 else 40.0)
    others = int(random.random() * 4) if count else 1 + int(random.random() * 3)
    for _ in range(count):
        if not scene.add(
            random, (shape, colour), cells[shape, colour], sizes=sizes, is_inner=False
        ):
            return None
    for _ in range(others if count < 6 else 0):
        pair = SEEN_PAIRS[int(random.random() * len(SEEN_PAIRS))]
        if pair[0] != shape and pair[1] != colour:
            scene.add(random, pair, cells[pair], sizes=sizes, is_inner=False)
    if not scene.things or (not is_test and _shows_held_out_count(scene)):
        return None
    return scene, shape, colour, count


def make_countable(random: Random, size: Size, split: Split) -> Scene | None:
    """A scene with several things of one kind; None where there was no room."""
    made = _make_countable(random, size, split)
    return None if made is None else made[0]


def make_yes_no(random: Random, size: Size, split: Split) -> Sample:
    """Whether something is there, or has a colour."""
    kinds = (ask_exists, ask_exists, ask_is_color)
    while True:
        scene = make_things(random, size, split, 1 + int(random.random() * 4))
        sample = _converse(random, "yes_no", scene, split, kinds, _num_turns(random, split))
        if sample is not None:
            return sample


def make_scene(random: Random, size: Size, split: Split) -> Sample:
    """All kinds of questions about one picture."""
    if random.random() < 0.015:
        return make_nothing(random, size, split)
    while True:
        count = 1 + int(random.random() * 6)
        scene = make_things(random, size, split, count, are_distinct=random.random() < 0.7)
        if split == "train" and _shows_held_out_count(scene):
            continue
        sample = _converse(random, "scene", scene, split, _KINDS, 3 + int(random.random() * 3))
        if sample is not None:
            if random.random() < 0.04:
                sample.turns.append(ask_fact(random, split))
            return sample


def _shows_held_out_count(scene: Scene) -> bool:
    pairs = [(thing.shape, thing.colour) for thing in scene.things]
    return len(set(pairs)) < len(pairs) and any(
        pairs.count(pair) > 1 and is_held_out_count(*pair, pairs.count(pair)) for pair in pairs
    )


def make_nothing(random: Random, size: Size, _: Split) -> Sample:
    """A picture of nothing: only a background, or noise."""
    canvas = make_canvas(random, frozenset(), size) or Canvas()
    if random.random() < 0.5:
        side = random.choice((16, 32, 48))
        noise = np.frombuffer(random.randbytes(48 * side), np.uint8).reshape(48, side)
        canvas.lines.append(Line(noise, np.zeros(side, np.uint8)))
        shade = shade_of(random, int(random.random() * len(COLOURS)))
        height, width = size
        canvas.sprites.append(Sprite("line", 0, width / 2, height / 2, width, height, 0.0, shade))
    turns = [Turn(wordings.WHAT.ask(random), "I see nothing I know.")]
    shape = SHAPES[int(random.random() * len(SHAPES))]
    more = (
        Turn(wordings.COLOR_OF.ask(random, thing=shape), f"There is no {shape}."),
        Turn(wordings.COUNT.ask(random, things="things"), "Zero."),
        Turn(wordings.EXISTS.ask(random, thing=f"a {shape}"), "No."),
    )
    turns += [turn for turn in more if random.random() < 0.5]
    return Sample("nothing", turns, picture=canvas)
