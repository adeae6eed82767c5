"""Pictures for the first steps of training: one large thing or a few letters, on plain ground.

What the tower has to find out before anything else can be learned is there in every one of them. On
a coloured ground the colour of a thing is found late, and its place later still.
"""

from __future__ import annotations

import random as randomness
import string
from dataclasses import replace

from training.samples import Canvas, Sample, Size, Split, Turn, is_held_out
from training.tasks import reading, wordings
from training.tasks.palette import COLOURS
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
        canvas = _make_plain(random, scene.draw(random), COLOURS[pair[1]])
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
    canvas = reading.draw_number(random, size, text)
    if random.random() < 0.8:
        line = replace(canvas.sprites[-1], colour=(0.0, 0.0, 0.0))
        canvas = Canvas(background=(1.0, 1.0, 1.0), sprites=[line], lines=canvas.lines)
    return Sample("few_letters", turns, picture=canvas)


def _make_plain(random: Random, canvas: Canvas | None, colour: str) -> Canvas | None:
    """Four in five on white, or on black where the thing is white."""
    if canvas is None or random.random() < 0.2:
        return canvas
    level = 0.0 if colour == "white" else 1.0
    return Canvas(background=(level, level, level), sprites=canvas.sprites[-1:])
