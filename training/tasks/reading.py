"""Tasks about text in pictures: words, random letters, numbers, prices and times.

`words.txt` is part of SCOWL by Kevin Atkinson, the lists english-words and american-words of sizes
10, 20 and a part of 35, of 2 to 9 letters; its licence is in `words-licence.txt`.
"""

from __future__ import annotations

import random as randomness
import string
from math import radians
from pathlib import Path

from training.pictures.lines import HELD_OUT_FONTS, TRAIN_FONTS, make_line
from training.samples import Canvas, Sample, Size, Split, Sprite, Turn, is_held_out
from training.tasks import wordings
from training.tasks.palette import COLOURS, make_text_canvas, name_of, readable_colour, shade_of
from training.tasks.scenes import NUMBERS, SQUARE, UNSEEN_PAIRS, sentence

Random = randomness.Random
LINE_HEIGHT = 48
_SIGNS = (0, 1, 1, 1, 7)  # circle, square, hexagon
_ALL_WORDS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split()
WORDS: dict[Split, tuple[str, ...]] = {
    "train": tuple(word for word in _ALL_WORDS if not is_held_out("word", word)),
    "test": tuple(word for word in _ALL_WORDS if is_held_out("word", word)),
}
BLACK, WHITE = COLOURS.index("black"), COLOURS.index("white")


def choose_colour(random: Random) -> int:
    chance = random.random()
    if chance < 0.3:
        return BLACK
    if chance < 0.4:
        return WHITE
    return int(random.random() * len(COLOURS))


def _in_case(random: Random, word: str) -> str:
    chance = random.random()
    if chance < 0.45:
        return word
    return word.upper() if chance < 0.85 else word.capitalize()


def choose_word(random: Random, split: Split) -> str:
    """A word, or in training three times in ten random letters."""
    if split == "test" or random.random() < 0.7:
        words = WORDS[split]
        return _in_case(random, words[int(random.random() * len(words))])
    while True:
        word = "".join(random.choices(string.ascii_lowercase, k=1 + int(random.random() * 8)))
        if not is_held_out("word", word):
            return _in_case(random, word)


def choose_number(random: Random, split: Split) -> str:
    """Digits, a price or a time; single digits are never held out."""
    while True:
        chance = random.random()
        if chance < 0.72 or split == "test":
            text = "".join(random.choices(string.digits, k=1 + int(random.random() * 8)))
        elif chance < 0.86:
            text = f"${int(10 ** (random.random() * 3))}.{random.choice(('99', '50', '00', '95'))}"
            if random.random() < 0.4:
                text = f"${int(random.random() * 100)}.{int(random.random() * 100):02d}"
        else:
            text = f"{int(random.random() * 24)}:{int(random.random() * 60):02d}"
        if (len(text) > 1 and is_held_out("digits", text)) == (split == "test"):
            return text


def _put_lines(
    random: Random, canvas: Canvas, size: Size, texts: list[str], font: int, colour: int
) -> tuple[float, float, float, float]:
    """Add one or two lines of text somewhere; x, y, width and height of the box around them."""
    height, width = size
    spacing = 0.0 if random.random() < 0.7 else random.random() * 6
    lines = [make_line(text, font, spacing=spacing) for text in texts]
    widest = max(line.width for line in lines)
    angle = 0.0 if random.random() < 0.5 else radians((random.random() - 0.5) * 16)
    room = 0.94 * width - 0.14 * height * (angle != 0.0)
    most = min(78.0, 0.8 * height / len(lines), room * LINE_HEIGHT / widest)
    least = min(18.0, most)
    scale = (least + (most - least) * random.random() ** 0.8) / LINE_HEIGHT
    box_width, box_height = widest * scale, len(lines) * LINE_HEIGHT * scale
    lean = abs(angle)
    free_x = max(0.0, width - box_width - lean * box_height - 4)
    free_y = max(0.0, height - box_height - lean * box_width - 4)
    x = width / 2 + (random.random() - 0.5) * free_x
    y = height / 2 + (random.random() - 0.5) * free_y
    shade = shade_of(random, colour)
    for number, line in enumerate(lines):
        down = (number - (len(lines) - 1) / 2) * LINE_HEIGHT * scale
        canvas.lines.append(line)
        canvas.sprites.append(
            Sprite(
                *("line", number, x - angle * down, y + down),
                *(line.width * scale, LINE_HEIGHT * scale, angle, shade),
            )
        )
    return x, y, box_width, box_height


def _choose_font(random: Random) -> int:
    return TRAIN_FONTS[int(random.random() * len(TRAIN_FONTS))]


def make_words(random: Random, size: Size, split: Split, *, font: int | None = None) -> Sample:
    """One word; in training also two, side by side or below each other."""
    texts = [choose_word(random, split)]
    chance = random.random()
    if split == "train" and chance < 0.22:
        texts.append(choose_word(random, split))
        if chance < 0.1 and len(texts[0]) + len(texts[1]) < 12:
            texts = [" ".join(texts)]
    colour = choose_colour(random)
    canvas = make_text_canvas(random, colour, size)
    _put_lines(random, canvas, size, texts, _choose_font(random) if font is None else font, colour)
    text = " ".join(texts)
    turns = [Turn(wordings.READ.ask(random), text)]
    if split == "train":
        _ask_more(random, turns, text, colour)
    return Sample("words", turns, picture=canvas)


def _ask_more(random: Random, turns: list[Turn], text: str, colour: int) -> None:
    """Now and then about the letters; before or after they were read."""
    chance = random.random()
    if chance < 0.08:
        turns.append(Turn(wordings.TEXT_COLOR.ask(random), sentence(COLOURS[colour])))
    elif chance < 0.12 and " " not in text and len(text) <= 10:
        turns.append(Turn(wordings.NUM_LETTERS.ask(random), sentence(NUMBERS[len(text)])))
    elif chance < 0.16:
        turns.append(Turn(wordings.FIRST_LETTER.ask(random), text[0] + "."))
    elif chance < 0.19:
        turns.append(Turn(wordings.LAST_LETTER.ask(random), text[-1] + "."))
    if random.random() < 0.3:
        turns.reverse()


def make_digits(random: Random, size: Size, split: Split, *, font: int | None = None) -> Sample:
    """A number, price or time, now and then on a sign."""
    text = choose_number(random, split)
    sample = Sample("digits", [Turn(wordings.READ_NUMBER.ask(random), text)])
    sample.picture = draw_number(random, size, text, font)
    if split == "train" and random.random() < 0.06 and text.isdigit():
        turn = Turn(wordings.NUM_DIGITS.ask(random), sentence(NUMBERS[len(text)]))
        sample.turns.append(turn)
    return sample


def draw_number(random: Random, size: Size, text: str, font: int | None = None) -> Canvas:
    colour = choose_colour(random)
    canvas = make_text_canvas(random, colour, size)
    if font is None:
        font = _choose_font(random)
    x, y, width, height = _put_lines(random, canvas, size, [text], font, colour)
    if random.random() < 0.15:
        shape = _SIGNS[int(random.random() * len(_SIGNS))]
        board = readable_colour(random, colour)
        if (shape, name_of(board)) in UNSEEN_PAIRS:
            shape = SQUARE
        wide = width * (1.15 if shape == 1 else 1.5) + 8
        high = height * 1.15 if shape == 1 else max(height * 1.5, 0.75 * wide)
        angle = canvas.sprites[-1].angle
        canvas.sprites.insert(-1, Sprite("shape", shape, x, y, wide, high, angle, board))
    return canvas


def make_words_in_unseen_font(random: Random, size: Size, split: Split) -> Sample:
    return make_words(random, size, split, font=random.choice(HELD_OUT_FONTS))


def make_digits_in_unseen_font(random: Random, size: Size, split: Split) -> Sample:
    return make_digits(random, size, split, font=random.choice(HELD_OUT_FONTS))
