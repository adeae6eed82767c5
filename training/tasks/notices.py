"""Pictures with several lines of text, each in a font and a size of its own.

A picture costs the same to look at, and teaches reading two to four times.
"""

from __future__ import annotations

import random as randomness

from training.pictures.lines import TRAIN_FONTS, make_line
from training.samples import Canvas, Sample, Size, Split, Sprite, Turn
from training.tasks import reading, wordings
from training.tasks.palette import make_text_canvas, shade_of

Random = randomness.Random
PLACES = {
    2: (("top", "first", "upper"), ("bottom", "second", "last", "lower")),
    3: (("top", "first"), ("middle", "second"), ("bottom", "third", "last")),
    4: (("top", "first"), ("second",), ("third",), ("bottom", "fourth", "last")),
}
_LEAST_HEIGHT = 18.0


def make_notice(random: Random, size: Size, split: Split) -> Sample:
    """Each line is asked for, in any order, or all at once."""
    num_lines = min(2 + int(random.random() * 3), size[0] // 45)
    texts = [_choose_text(random, split) for _ in range(num_lines)]
    colour = reading.choose_colour(random)
    canvas = make_text_canvas(random, colour, size)
    for number, text in enumerate(texts):
        _put_line(random, canvas, size, text, (number, num_lines), colour)
    turns = [
        Turn(wordings.READ_LINE.ask(random, place=random.choice(places)), text)
        for places, text in zip(PLACES[num_lines], texts, strict=True)
    ]
    random.shuffle(turns)
    if random.random() < 0.25:
        turns = [Turn(wordings.READ_ALL.ask(random), " ".join(texts))]
    return Sample("notice", turns, picture=canvas)


def _choose_text(random: Random, split: Split) -> str:
    if random.random() < 0.3:
        return reading.choose_number(random, split)
    return reading.choose_word(random, split)


def _put_line(
    random: Random, canvas: Canvas, size: Size, text: str, place: tuple[int, int], colour: int
) -> None:
    """Somewhere in its band; bands lie below each other."""
    height, width = size
    number, num_lines = place
    band = height / num_lines
    line = make_line(text, TRAIN_FONTS[int(random.random() * len(TRAIN_FONTS))])
    most = min(0.95 * band, 0.94 * width * reading.LINE_HEIGHT / line.width)
    least = min(_LEAST_HEIGHT, most)
    line_height = least + (most - least) * random.random()
    line_width = line.width * line_height / reading.LINE_HEIGHT
    x = width / 2 + (random.random() - 0.5) * max(0.0, width - line_width - 4)
    y = band * (number + 0.5) + (random.random() - 0.5) * (band - line_height)
    canvas.lines.append(line)
    shade = shade_of(random, colour)
    canvas.sprites.append(
        Sprite("line", len(canvas.lines) - 1, x, y, line_width, line_height, 0.0, shade)
    )
