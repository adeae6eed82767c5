"""Tasks about emoji: what they show, and where they are.

Of every emoji one of the outer cells of a picture, at least, is kept for the test.
"""

from __future__ import annotations

import random as randomness
from collections.abc import Callable
from dataclasses import dataclass

from training.pictures.emoji_names import EMOJI_NAMES
from training.samples import Canvas, Sample, Size, Split, Sprite, Turn, is_held_out
from training.tasks import wordings
from training.tasks.palette import jittered, make_canvas
from training.tasks.phrasing import Phrases
from training.tasks.scenes import (
    CELLS,
    NUMBERS,
    Scene,
    Thing,
    is_held_out_relation,
    relation_of,
    sentence,
)
from training.tasks.text import ask_fact

Random = randomness.Random
NUM_STYLES = 2
_PLURALS_AND_SUBSTANCES = """
    blueberries, cherries, fries, grapes, pancakes, glasses, gloves, jeans, shorts, socks, skis,
    sunglasses, headphones, maracas, scissors, footprints, paw prints, bacon, bread, broccoli,
    cheese, chocolate, coffee, corn, garlic, honey, milk, popcorn, salad, sushi, beer, wine, fire,
    lightning, rain, bowling, ping pong, tennis, yarn, dice, thumbs up, thumbs down
"""
_WITHOUT_ARTICLE = frozenset(" ".join(_PLURALS_AND_SUBSTANCES.split()).split(", "))
_WITH_AN = ("hourglass",)
_WITH_A = ("ufo", "unicorn")


def phrase_of(name: str) -> str:
    """Return the name with its article, such as "a dog", "an apple" or "grapes"."""
    if name in _WITHOUT_ARTICLE:
        return name
    if name in _WITH_AN or (name[0] in "aeiou" and name not in _WITH_A):
        return f"an {name}"
    return f"a {name}"


PHRASES = tuple(phrase_of(name) for name in EMOJI_NAMES)


def _held_out_cells(number: int) -> tuple[int, ...]:
    outer = (0, 1, 2, 3, 5, 6, 7, 8)
    found = tuple(cell for cell in outer if is_held_out("emoji", number, cell))
    return found or (outer[number % 8],)


_TEST_CELLS = tuple(_held_out_cells(number) for number in range(NUM_STYLES * len(EMOJI_NAMES)))
CELLS_OF: dict[Split, tuple[tuple[int, ...], ...]] = {
    "test": _TEST_CELLS,
    "train": tuple(tuple(cell for cell in range(9) if cell not in cells) for cells in _TEST_CELLS),
}

IS_IT = Phrases(
    "Is this {thing}?",
    "Is it {thing}?",
    "Is that {thing}?",
    "Does the picture show {thing}?",
    "Do you see {thing}?",
    "Can you see {thing}?",
    "Yes or no: is this {thing}?",
)
EXISTS = Phrases(
    "Do you see {thing}?",
    "Can you see {thing}?",
    "Does the picture show {thing}?",
    "Can you find {thing}?",
    "Does the image contain {thing}?",
    "Do you see {thing} in the picture?",
    "Is there {thing}?",
    "Is there {thing} in the picture?",
)
WHAT = Phrases(
    *wordings.WHAT.templates,
    "Which emoji is this?",
    "What emoji do you see?",
    "Name this emoji.",
    "What does the emoji show?",
)


@dataclass(slots=True)
class Emoji(Thing):
    """An emoji on a canvas; `shape` is the number of what it shows, `colour` that of its style."""

    @property
    def name(self) -> str:
        return EMOJI_NAMES[self.shape]

    @property
    def phrase(self) -> str:
        return PHRASES[self.shape]


def _add(
    random: Random, scene: Scene, split: Split, sizes: tuple[float, float], is_inner: bool
) -> None:
    concept, style = int(random.random() * len(EMOJI_NAMES)), int(random.random() * NUM_STYLES)
    if any(thing.shape == concept for thing in scene.things):
        return
    cells = CELLS_OF[split][concept * NUM_STYLES + style]
    room = scene.find_room(random, cells, sizes, is_inner)
    if room is not None:
        scene.things.append(Emoji(concept, style, *room))


def _draw(random: Random, scene: Scene) -> Canvas:
    canvas = make_canvas(random, frozenset(), (scene.height, scene.width)) or Canvas()
    if random.random() < 0.35:  # light ones, as people have them
        canvas = Canvas(background=jittered(random, (0.97, 0.97, 0.97)))
    if random.random() < 0.15:
        _add_clutter(random, scene, canvas)
    for thing in scene.things:
        angle = 0.0 if random.random() < 0.4 else (random.random() - 0.5) * 0.7
        number = thing.shape * NUM_STYLES + thing.colour
        sprite = Sprite("emoji", number, thing.x, thing.y, thing.size, thing.size, angle)
        canvas.sprites.append(sprite)
    return canvas


def _add_clutter(random: Random, scene: Scene, canvas: Canvas) -> None:
    """Pale shapes, hardly different from the background, behind everything."""
    red, green, blue = canvas.background
    step = 0.06 if red + green + blue < 1.5 else -0.06
    tone = (
        min(1.0, max(0.0, red + step)),
        min(1.0, max(0.0, green + step)),
        min(1.0, max(0.0, blue + step)),
    )
    for _ in range(1 + int(random.random() * 4)):
        size = 20 + random.random() * 70
        x, y = random.random() * scene.width, random.random() * scene.height
        shape = int(random.random() * 10)
        canvas.sprites.append(Sprite("shape", shape, x, y, size, size, random.random(), tone))


def make_emoji(random: Random, size: Size, split: Split) -> Sample:
    """Ask what the only emoji of a picture is."""
    scene = Scene(*size)
    is_inner = random.random() < 0.5
    while not scene.things:
        least = (40.0, 56.0, 72.0, 100.0)[int(random.random() * 4)]
        _add(random, scene, split, (least, min(200.0, 0.9 * min(size))), is_inner)
    thing = scene.things[0]
    turns = [Turn(WHAT.ask(random), sentence(PHRASES[thing.shape]))]
    if split == "train":
        for ask in (_ask_is_it, _ask_where):
            turn = ask(random, scene, split) if random.random() < 0.35 else None
            if turn is not None:
                turns.append(turn)
    return Sample("emoji", turns, picture=_draw(random, scene))


def make_emoji_scene(random: Random, size: Size, split: Split) -> Sample:
    """One to four emoji, and several questions."""
    while True:
        scene = Scene(*size)
        is_inner = split == "test" or random.random() < 0.75
        for _ in range(1 + int(random.random() * 4)):
            _add(random, scene, split, (40.0, 110.0), is_inner)
        if not scene.things:
            continue
        turns: list[Turn] = []
        wanted = 3 + int(random.random() * 3)
        for _ in range(3 * wanted):
            kind = _KINDS[int(random.random() * len(_KINDS))]
            turn = kind(random, scene, split)
            if turn is not None and all(turn.question != asked.question for asked in turns):
                turns.append(turn)
                if len(turns) == wanted:
                    break
        if turns and random.random() < 0.04:
            turns.append(ask_fact(random, split))
        if turns:
            return Sample("emoji_scene", turns, picture=_draw(random, scene))


def _choose(random: Random, scene: Scene) -> Thing:
    return scene.things[int(random.random() * len(scene.things))]


def _other_name(random: Random, scene: Scene) -> int | None:
    """Return a name that is not in the picture, and that resembles none in it."""
    concept = int(random.random() * len(EMOJI_NAMES))
    name = EMOJI_NAMES[concept]
    if any(name in thing.name or thing.name in name for thing in scene.things):
        return None
    return concept


def _ask_is_it(random: Random, scene: Scene, _: Split) -> Turn | None:
    concept: int | None = scene.things[0].shape
    is_it = random.random() < 0.5
    if not is_it:
        concept = _other_name(random, scene)
    if concept is None:
        return None
    return Turn(IS_IT.ask(random, thing=PHRASES[concept]), "Yes." if is_it else "No.")


def _ask_what(random: Random, scene: Scene, _: Split) -> Turn | None:
    things = sorted(scene.things, key=lambda thing: thing.x)
    if len(things) > 3:
        return Turn(wordings.WHAT.ask(random), sentence(f"{NUMBERS[len(things)]} things"))
    if any(things[n + 1].x - things[n].x < 20 for n in range(len(things) - 1)):
        return None
    phrases = [PHRASES[thing.shape] for thing in things]
    if len(phrases) == 1:
        return Turn(WHAT.ask(random), sentence(phrases[0]))
    answer = sentence(", ".join(phrases[:-1]) + " and " + phrases[-1])
    return Turn(wordings.LIST.ask(random), answer)


def _ask_where(random: Random, scene: Scene, _: Split) -> Turn | None:
    thing = _choose(random, scene)
    if not scene.is_well_inside(thing) or thing.size > 110:
        return None
    question = wordings.WHERE.ask(random, thing=thing.name)
    return Turn(question, sentence(CELLS[thing.cell]))


def _ask_at(random: Random, scene: Scene, _: Split) -> Turn | None:
    thing = _choose(random, scene)
    if not scene.is_well_inside(thing):
        return None
    if sum(other.cell == thing.cell for other in scene.things) > 1:
        return None
    # Only the wordings that can't mean a whole side.
    place = wordings.PLACES[thing.cell][2 + int(random.random() * 2)]
    return Turn(wordings.WHAT_AT.ask(random, place=place), sentence(PHRASES[thing.shape]))


def _ask_exists(random: Random, scene: Scene, _: Split) -> Turn | None:
    is_there = random.random() < 0.5
    concept = _choose(random, scene).shape if is_there else _other_name(random, scene)
    if concept is None:
        return None
    return Turn(EXISTS.ask(random, thing=PHRASES[concept]), "Yes." if is_there else "No.")


def _ask_count(random: Random, scene: Scene, _: Split) -> Turn:
    things = ("things", "emoji", "objects", "items", "pictures")[int(random.random() * 5)]
    question = wordings.COUNT.ask(random, things=things)
    return Turn(question, sentence(NUMBERS[len(scene.things)]))


def _ask_relation(random: Random, scene: Scene, split: Split) -> Turn | None:
    if len(scene.things) != 2:
        return None
    one, other = scene.things if random.random() < 0.5 else scene.things[::-1]
    relation = relation_of(one, other)
    if relation is None or is_held_out_relation(one, other, relation) != (split == "test"):
        return None
    chance = random.random()
    words = wordings.RELATIONS
    if chance < 0.4:
        question = wordings.WHAT_IS_RELATED.ask(
            random, other=other.name, relation=words[relation][int(random.random() * 2)]
        )
        return Turn(question, sentence(PHRASES[one.shape]))
    if chance < 0.6:
        question = wordings.WHERE_RELATED.ask(random, one=one.name, other=other.name)
        return Turn(question, sentence(relation))
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}[relation]
    asked = relation if chance < 0.8 else opposite
    question = wordings.IS_RELATED.ask(
        random, one=one.name, other=other.name, relation=words[asked][int(random.random() * 3)]
    )
    return Turn(question, "Yes." if asked == relation else "No.")


def _ask_absent(random: Random, scene: Scene, _: Split) -> Turn | None:
    concept = _other_name(random, scene)
    if concept is None or random.random() < 0.4:
        return Turn(wordings.UNKNOWABLE.ask(random), "I can't tell.")
    name = EMOJI_NAMES[concept]
    return Turn(wordings.WHERE.ask(random, thing=name), f"There is no {name}.")


_KINDS: tuple[Callable[[Random, Scene, Split], Turn | None], ...] = (
    *(_ask_what, _ask_what, _ask_what, _ask_where, _ask_at, _ask_at, _ask_exists, _ask_exists),
    *(_ask_count, _ask_relation, _ask_relation, _ask_absent),
)
