"""Pictures for the first steps of training: one large thing, or a few large letters.

What the tower has to find out before anything else can be learned is there in every one of them.
"""

from __future__ import annotations

import random as randomness
import string

from training.samples import Sample, Size, Split, Turn, is_held_out
from training.tasks import reading, wordings
from training.tasks.scenes import CELLS_OF, Scene, choose_pair
from training.tasks.shape_questions import ask_color, ask_position, ask_shape, ask_what

Random = randomness.Random


def make_one_thing(random: Random, size: Size, split: Split) -> Sample:
    """What it is, its colour, its shape and where it is."""
    while True:
        scene = Scene(*size)
        pair = choose_pair(random, split)
        sizes = (0.25 * min(size), 0.7 * min(size))
        if not scene.add(random, pair, CELLS_OF[split][pair], sizes=sizes):
            continue
        canvas = scene.draw(random)
        asked = [
            ask(random, scene, split) for ask in (ask_what, ask_color, ask_shape, ask_position)
        ]
        turns = [turn for turn in asked if turn is not None]
        if canvas is not None and turns:
            random.shuffle(turns)
            return Sample("one_thing", turns, picture=canvas)


def make_few_letters(random: Random, size: Size, _: Split) -> Sample:
    """One to three of them, or digits; in either split only what is not held out."""
    letters = random.choice((string.digits, string.ascii_lowercase, string.ascii_uppercase))
    text = ""
    while not text or is_held_out("word", text.lower()) or is_held_out("digits", text):
        text = "".join(random.choices(letters, k=1 + int(random.random() * 3)))
    turns = [Turn(wordings.READ.ask(random), text)]
    return Sample("few_letters", turns, picture=reading.draw_number(random, size, text))
