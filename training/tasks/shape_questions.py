"""Questions about coloured shapes: each function asks one kind, or None where it has no answer.

Every question that is asked has exactly one right answer, and never asks in training for what is
held out.
"""

from __future__ import annotations

import random as randomness
from itertools import pairwise

from training.samples import Split, Turn
from training.tasks import wordings
from training.tasks.palette import COLOURS
from training.tasks.scenes import (
    CELLS,
    NUMBERS,
    PLURALS,
    SEEN_PAIRS,
    SHAPES,
    Scene,
    Thing,
    is_held_out_count,
    is_held_out_relation,
    relation_of,
    sentence,
    with_article,
)

Random = randomness.Random
_THINGS = ("things", "shapes", "objects", "items", "figures")


def refer(random: Random, scene: Scene, thing: Thing) -> str | None:
    """What to call one thing of a scene, without the article; None if it is not the only one."""
    if len(scene.things) == 1:
        return (thing.name, SHAPES[thing.shape], "thing")[int(random.random() * 3)]
    if len(scene.with_pair(thing.shape, thing.colour)) > 1:
        return None
    chance = random.random()
    if chance < 0.45 and len(scene.with_shape(thing.shape)) == 1:
        return SHAPES[thing.shape]
    if chance > 0.85 and len(scene.with_colour(thing.colour)) == 1:
        return f"{COLOURS[thing.colour]} thing"
    return thing.name


def choose(random: Random, scene: Scene) -> Thing:
    return scene.things[int(random.random() * len(scene.things))]


def describe(scene: Scene) -> str | None:
    """All of it in one sentence; None if the order of the things is not clear."""
    things = sorted(scene.things, key=lambda thing: thing.x)
    count = len(things)
    first = things[0]
    if count > 1 and all(t.name == first.name for t in things):
        return sentence(f"{NUMBERS[count]} {COLOURS[first.colour]} {PLURALS[first.shape]}")
    if count > 3:
        return sentence(f"{NUMBERS[count]} things")
    if any(b.x - a.x < 16 for a, b in pairwise(things)):
        return None
    names = [with_article(thing.name) for thing in things]
    if count == 1:
        return sentence(names[0])
    return sentence(", ".join(names[:-1]) + " and " + names[-1])


def ask_what(random: Random, scene: Scene, _: Split) -> Turn | None:
    answer = describe(scene)
    if answer is None:
        return None
    wording = wordings.LIST if " and " in answer else wordings.WHAT
    return Turn(wording.ask(random), answer)


def ask_color(random: Random, scene: Scene, _: Split) -> Turn | None:
    if len(scene.things) == 1 and random.random() < 0.6:
        return Turn(wordings.COLOR_OF_IT.ask(random), sentence(COLOURS[scene.things[0].colour]))
    thing = choose(random, scene)
    if len(scene.with_shape(thing.shape)) > 1:
        return None
    question = wordings.COLOR_OF.ask(random, thing=SHAPES[thing.shape])
    return Turn(question, sentence(COLOURS[thing.colour]))


def ask_shape(random: Random, scene: Scene, _: Split) -> Turn | None:
    thing = choose(random, scene)
    answer = sentence(with_article(SHAPES[thing.shape]))
    if len(scene.things) == 1 and random.random() < 0.6:
        return Turn(wordings.SHAPE_OF_IT.ask(random), answer)
    if len(scene.with_colour(thing.colour)) > 1:
        return None
    return Turn(wordings.SHAPE_OF.ask(random, color=COLOURS[thing.colour]), answer)


def ask_position(random: Random, scene: Scene, _: Split) -> Turn | None:
    thing = choose(random, scene)
    name = refer(random, scene, thing)
    if name is None or not scene.is_well_inside(thing):
        return None
    return Turn(wordings.WHERE.ask(random, thing=name), sentence(CELLS[thing.cell]))


def ask_at_position(random: Random, scene: Scene, _: Split) -> Turn | None:
    is_empty = random.random() < 0.12
    cell = int(random.random() * 9) if is_empty else choose(random, scene).cell
    row, column = divmod(cell, 3)
    x, y = (column + 0.5) * scene.width / 3, (row + 0.5) * scene.height / 3
    near = [
        thing
        for thing in scene.things
        if abs(thing.x - x) < scene.width * 0.22 and abs(thing.y - y) < scene.height * 0.22
    ]
    is_side = cell in (1, 3, 5, 7) and _num_at_side(scene, cell) > (not is_empty)
    place = wordings.PLACES[cell][
        2 + int(random.random() * 2) if is_side else int(random.random() * 4)
    ]
    question = wordings.WHAT_AT.ask(random, place=place)
    if not near:
        is_clear = is_empty and not is_side
        return Turn(question, "Nothing.") if is_clear else None
    if len(near) > 1 or near[0].cell != cell or not scene.is_well_inside(near[0]):
        return None
    return Turn(question, sentence(with_article(near[0].name)))


def _is_at_side(thing: Thing, cell: int) -> bool:
    """Whether a thing is at the top, left, right or bottom, in the middle or in a corner."""
    row, column = divmod(thing.cell, 3)
    return (row, column, column, row)[cell // 2] == (0, 0, 2, 2)[cell // 2]


def _num_at_side(scene: Scene, cell: int) -> int:
    return sum(_is_at_side(thing, cell) for thing in scene.things)


def ask_count(random: Random, scene: Scene, split: Split) -> Turn | None:
    """How many things there are of a shape, of a colour, of both, or in all."""
    thing = choose(random, scene)
    shape, colour = thing.shape, thing.colour
    chance = random.random()
    if chance < 0.25:
        matching, things = scene.things, _THINGS[int(random.random() * len(_THINGS))]
    elif chance < 0.5:
        matching, things = scene.with_shape(shape), PLURALS[shape]
    elif chance < 0.7:
        matching = scene.with_colour(colour)
        things = f"{COLOURS[colour]} {_THINGS[int(random.random() * 3)]}"
    else:
        if random.random() < 0.35:
            shape, colour = SEEN_PAIRS[int(random.random() * len(SEEN_PAIRS))]
        matching, things = scene.with_pair(shape, colour), f"{COLOURS[colour]} {PLURALS[shape]}"
    if split == "train" and breaks_count(matching, shape, colour):
        return None
    if len(matching) == 1 and random.random() < 0.6:  # the most frequent answer otherwise
        return None
    return Turn(wordings.COUNT.ask(random, things=things), sentence(NUMBERS[len(matching)]))


def breaks_count(matching: list[Thing], shape: int, colour: int) -> bool:
    """Whether the answer would tell how many there are of a held-out combination."""
    if any(t.shape != shape or t.colour != colour for t in matching):
        return False
    return is_held_out_count(shape, colour, len(matching))


def _choose_two(random: Random, scene: Scene) -> tuple[Thing, Thing] | None:
    things = scene.things
    if len(things) < 2:
        return None
    first = int(random.random() * len(things))
    second = (first + 1 + int(random.random() * (len(things) - 1))) % len(things)
    return things[first], things[second]


def ask_relation(random: Random, scene: Scene, split: Split) -> Turn | None:
    """Whether, or where, one thing is relative to another, or what is there."""
    two = _choose_two(random, scene)
    if two is None:
        return None
    one, other = two
    relation = relation_of(one, other)
    if relation is None or is_held_out_relation(one, other, relation) != (split == "test"):
        return None
    other_name = refer(random, scene, other)
    one_name = refer(random, scene, one)
    if one_name is None or other_name is None:
        return None
    chance = random.random()
    words = wordings.RELATIONS
    if chance < 0.5:
        opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}[relation]
        asked = relation if chance < 0.25 else opposite
        question = wordings.IS_RELATED.ask(
            random, one=one_name, other=other_name, relation=words[asked][int(random.random() * 3)]
        )
        return Turn(question, "Yes." if asked == relation else "No.")
    if chance < 0.75:
        if not _is_only_one(scene, one, other, relation):
            return None
        asked = words[relation][int(random.random() * 2)]
        question = wordings.WHAT_IS_RELATED.ask(random, other=other_name, relation=asked)
        return Turn(question, sentence(with_article(one.name)))
    question = wordings.WHERE_RELATED.ask(random, one=one_name, other=other_name)
    return Turn(question, sentence(relation))


def _is_only_one(scene: Scene, one: Thing, other: Thing, relation: str) -> bool:
    """Whether nothing else is on that side of the other thing."""
    for thing in scene.things:
        if thing is one or thing is other:
            continue
        across, down = thing.x - other.x, thing.y - other.y
        side = {"left": -across, "right": across, "above": -down, "below": down}[relation]
        if side > -5:
            return False
    return True


def ask_exists(random: Random, scene: Scene, _: Split) -> Turn | None:
    """Whether there is a shape, a colour, or a shape of a colour; yes as often as no."""
    chance = random.random()
    is_there = random.random() < 0.5
    thing = choose(random, scene)
    shape, colour = thing.shape, thing.colour
    if not is_there:
        shape, colour = SEEN_PAIRS[int(random.random() * len(SEEN_PAIRS))]
        if chance >= 0.5 and random.random() < 0.6:  # a near miss
            shape, colour = (thing.shape, colour) if chance < 0.75 else (shape, thing.colour)
    if chance < 0.3:
        name, found = SHAPES[shape], scene.with_shape(shape)
    elif chance < 0.5:
        name, found = f"{COLOURS[colour]} thing", scene.with_colour(colour)
    else:
        name, found = f"{COLOURS[colour]} {SHAPES[shape]}", scene.with_pair(shape, colour)
    if not is_there and (found or (shape, colour) not in _SEEN):
        return None
    return Turn(wordings.EXISTS.ask(random, thing=with_article(name)), "Yes." if found else "No.")


_SEEN = frozenset(SEEN_PAIRS)


def ask_biggest(random: Random, scene: Scene, _: Split) -> Turn | None:
    if len(scene.things) < 2:
        return None
    things = sorted(scene.things, key=lambda thing: thing.size)
    is_biggest = random.random() < 0.5
    found, next_one = (things[-1], things[-2]) if is_biggest else (things[0], things[1])
    if max(found.size, next_one.size) < 1.5 * min(found.size, next_one.size):
        return None
    wording = wordings.BIGGEST if is_biggest else wordings.SMALLEST
    return Turn(wording.ask(random), sentence(with_article(found.name)))


def ask_same_color(random: Random, scene: Scene, _: Split) -> Turn | None:
    two = _choose_two(random, scene)
    if two is None or any(len(scene.with_shape(thing.shape)) > 1 for thing in two):
        return None
    one, other = two
    question = wordings.SAME_COLOR.ask(random, one=SHAPES[one.shape], other=SHAPES[other.shape])
    return Turn(question, "Yes." if one.colour == other.colour else "No.")


def ask_is_color(random: Random, scene: Scene, _: Split) -> Turn | None:
    thing = choose(random, scene)
    if len(scene.with_shape(thing.shape)) > 1:
        return None
    colour = thing.colour if random.random() < 0.5 else int(random.random() * len(COLOURS))
    if (thing.shape, colour) not in _SEEN:
        return None
    question = wordings.IS_COLOR.ask(random, thing=SHAPES[thing.shape], color=COLOURS[colour])
    return Turn(question, "Yes." if colour == thing.colour else "No.")


def ask_absent(random: Random, scene: Scene, _: Split) -> Turn | None:
    """About something that is not there, or that no picture tells."""
    chance = random.random()
    if chance < 0.3:
        if chance < 0.06:
            return Turn(wordings.READ.ask(random), "I see no text.")
        return Turn(wordings.UNKNOWABLE.ask(random), "I can't tell.")
    if chance < 0.5:
        colour = int(random.random() * len(COLOURS))
        if scene.with_colour(colour):
            return None
        question = wordings.SHAPE_OF.ask(random, color=COLOURS[colour])
        return Turn(question, f"There is nothing {COLOURS[colour]}.")
    shape = int(random.random() * len(SHAPES))
    if scene.with_shape(shape):
        return None
    wording = wordings.COLOR_OF if chance < 0.75 else wordings.WHERE
    return Turn(
        wording.ask(random, thing=SHAPES[shape]),
        f"There is no {SHAPES[shape]}.",
    )
