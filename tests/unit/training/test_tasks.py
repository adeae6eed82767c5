"""Tasks: answers are worked out again from what is drawn; training never shows what is held out."""

from __future__ import annotations

import random as randomness
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from training.pictures.emoji_names import EMOJI_NAMES
from training.samples import Canvas, Line, Sample, Split, Sprite, is_held_out
from training.speech.sentences import VOCABULARY, is_test_sentence
from training.tasks import emoji, mixture, notices, reading, shapes, spoken, text, video, wordings
from training.tasks.palette import COLOURS, is_background, name_of
from training.tasks.scenes import (
    CELLS,
    CELLS_OF,
    NUMBERS,
    PLURALS,
    SHAPES,
    UNSEEN_PAIRS,
    is_held_out_count,
)

SIZE = (224, 224)
NUM_SAMPLES = 300
SHAPE_MAKERS = (
    *(shapes.make_shape_color, shapes.make_position, shapes.make_relation, shapes.make_count),
    *(shapes.make_yes_no, shapes.make_scene),
)
MAKERS = tuple(
    {maker for makers in mixture.MIXTURE.values() for maker, _ in makers}
    | set(mixture.EVALUATION.values())
)
PLACES_OF_LINES = {place for rows in notices.PLACES.values() for row in rows for place in row}
SPLITS: tuple[Split, ...] = ("train", "test")


@pytest.fixture(autouse=True)
def lines_without_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_line(text: str, font_number: int, *, spacing: float = 0.0) -> Line:
        width = int(len(text) * (20 + spacing)) + 4
        return Line(np.full((48, width), font_number, np.uint8), np.zeros(width, np.uint8))

    for module in (reading, notices):
        monkeypatch.setattr(module, "make_line", make_line)


def make(maker: mixture.Maker, split: Split, seed: int = 0) -> list[Sample]:
    random = randomness.Random(seed)
    size = (112, 112) if maker.__module__.endswith("video") else SIZE
    return [maker(random, size, split) for _ in range(NUM_SAMPLES)]


class Seen:
    """A thing as it can be read off the canvas."""

    def __init__(self, sprite: Sprite, size: tuple[int, int] = SIZE) -> None:
        self.shape, self.colour = SHAPES[sprite.number], COLOURS[name_of(sprite.colour)]
        self.x, self.y, self.size = sprite.x, sprite.y, sprite.height
        self.cell = int(self.y * 3 / size[0]) * 3 + int(self.x * 3 / size[1])

    @property
    def pair(self) -> tuple[int, int]:
        return SHAPES.index(self.shape), COLOURS.index(self.colour)


def see(sample: Sample) -> list[Seen]:
    canvas: Canvas | None = sample.picture
    assert canvas is not None
    return [
        Seen(sprite)
        for sprite in canvas.sprites
        if sprite.kind == "shape" and not is_background(sprite, SIZE)
    ]


def american(question: str) -> str:
    question = question.lower().replace("colour", "color")
    return question.replace("grey", "gray").replace("centre", "center")


_COLOR = "|".join(COLOURS)
_THINGS = "things|shapes|objects|items|figures"
_REFERENCE = re.compile(rf"\b(?:({_COLOR}) )?({'|'.join(SHAPES)}|thing)\b")
_PLURAL = re.compile(rf"\b(?:({_COLOR}) )?({'|'.join(PLURALS)}|{_THINGS})\b")


def find(things: list[Seen], color: str | None, shape: str) -> list[Seen]:
    return [
        thing
        for thing in things
        if color in (None, "", thing.colour) and shape in ("thing", thing.shape)
    ]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "maker", sorted(MAKERS, key=lambda maker: maker.__name__), ids=lambda maker: maker.__name__
)
def test_every_question_can_be_sent_and_has_a_short_answer(
    maker: mixture.Maker, split: Split
) -> None:
    samples = make(maker, split)
    for sample in samples:
        assert 1 <= len(sample.turns) <= 6
        assert sample.picture is None or sample.video is None
        for number, turn in enumerate(sample.turns):
            assert turn.answer
            assert turn.answer == turn.answer.strip()
            assert len(turn.answer) < 130
            assert "{" not in turn.question + turn.answer
            assert turn.question or (number == 0 and sample.speech)
        if sample.video is not None:
            assert len(sample.video) == 8
        if sample.speech is not None:
            assert set(sample.speech.split()) <= set(VOCABULARY), sample.speech
    again = make(maker, split)
    assert [sample.turns for sample in samples] == [sample.turns for sample in again]


@pytest.mark.parametrize("size", [(224, 224), (168, 308), (280, 168)])
@pytest.mark.parametrize("maker", [*SHAPE_MAKERS, emoji.make_emoji_scene])
def test_things_lie_on_the_canvas_and_do_not_touch(
    maker: mixture.Maker, size: tuple[int, int]
) -> None:
    random = randomness.Random(1)
    kind = "emoji" if maker is emoji.make_emoji_scene else "shape"
    for _ in range(100):
        canvas = maker(random, size, "train").picture
        assert canvas is not None
        sprites = [s for s in canvas.sprites if s.kind == kind and not is_background(s, size)]
        for number, one in enumerate(sprites):
            assert one.height / 2 <= one.x <= size[1] - one.height / 2
            assert one.height / 2 <= one.y <= size[0] - one.height / 2
            for other in sprites[:number]:
                away = np.hypot(one.x - other.x, one.y - other.y)
                assert away > 0.6 * (one.height + other.height)


@pytest.mark.parametrize("maker", SHAPE_MAKERS, ids=lambda maker: maker.__name__)
def test_training_never_shows_held_out_combinations(maker: mixture.Maker) -> None:
    for sample in make(maker, "train"):
        things = see(sample)
        for thing in things:
            assert thing.pair not in UNSEEN_PAIRS
            assert thing.cell in CELLS_OF["train"][thing.pair]
        for pair, count in Counter(thing.pair for thing in things).items():
            assert count == 1 or not is_held_out_count(*pair, count)
        for turn in sample.turns:
            for shape, colour in UNSEEN_PAIRS:
                assert f"{COLOURS[colour]} {SHAPES[shape]}" not in american(turn.question)


def test_signs_behind_numbers_are_no_held_out_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "readable_colour", lambda *_: (0.98, 0.55, 0.06))
    signs = [thing for sample in make(reading.make_digits, "train") for thing in see(sample)]
    assert {thing.colour for thing in signs} == {"orange"}
    assert {thing.shape for thing in signs} == {"circle", "square"}


def test_test_pictures_show_only_held_out_combinations() -> None:
    for maker in (shapes.make_shape_color, shapes.make_position, shapes.make_yes_no):
        for sample in make(maker, "test"):
            for thing in see(sample):
                assert thing.cell in CELLS_OF["test"][thing.pair]
                assert thing.pair not in UNSEEN_PAIRS
    for sample in make(shapes.make_unseen_pairs, "test"):
        assert {thing.pair for thing in see(sample)} <= set(UNSEEN_PAIRS)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("maker", [shapes.make_count, shapes.make_scene])
def test_counts_are_those_of_the_canvas(maker: mixture.Maker, split: Split) -> None:
    checked = 0
    for sample in make(maker, split):
        for turn in sample.turns:
            number = turn.answer.rstrip(".").lower()
            if number not in NUMBERS:
                continue
            match = _PLURAL.search(american(turn.question))
            assert match, turn.question
            color, plural = match.groups()
            shape = SHAPES[PLURALS.index(plural)] if plural in PLURALS else "thing"
            found = find(see(sample), color, shape)
            assert NUMBERS[len(found)] == number, turn
            checked += 1
            pairs = {thing.pair for thing in found}
            if len(pairs) == 1 and (split == "train" or maker is shapes.make_count):
                assert is_held_out_count(*pairs.pop(), len(found)) == (split == "test")
    assert checked > 50  # fewer count questions among all kinds


@pytest.mark.parametrize("split", SPLITS)
def test_positions_are_those_of_the_canvas(split: Split) -> None:
    places = {place: cell for cell, names in enumerate(wordings.PLACES) for place in names}
    for sample in make(shapes.make_position, split):
        things = see(sample)
        for turn in sample.turns:
            question, answer = american(turn.question), turn.answer.rstrip(".").lower()
            if answer in CELLS:
                (found,) = find(things, *_REFERENCE.findall(question)[0])
                assert CELLS[found.cell] == answer
                assert all(0.14 < (v * 3 / 224) % 1 < 0.86 for v in (found.x, found.y))
                continue
            cell = places[max((place for place in places if place in question), key=len)]
            inside = [f"{t.colour} {t.shape}" for t in things if t.cell == cell]
            assert inside == ([] if answer == "nothing" else [answer.split(" ", 1)[1]])


@pytest.mark.parametrize("split", SPLITS)
def test_relations_are_those_of_the_canvas(split: Split) -> None:
    words = {word: name for name, names in wordings.RELATIONS.items() for word in names}
    for sample in make(shapes.make_relation, split):
        things = see(sample)
        for turn in sample.turns:
            question, answer = american(turn.question), turn.answer.rstrip(".").lower()
            references = [
                find(things, color, shape)[0]
                for color, shape in _REFERENCE.findall(question)
                if color or shape != "thing"
            ]
            if answer in wordings.RELATIONS:
                one, other = references
                if re.search("on which side|seen from [^,]*, where", question):
                    one, other = other, one
                relation = answer
            else:
                asked = max((word for word in words if f" {word} " in question), key=len)
                relation, one, other = words[asked], references[0], references[-1]
                if answer not in ("yes", "no"):
                    (one,) = find(things, *answer.split()[-2:])
            across, down = one.x - other.x, one.y - other.y
            way = {"left": -across, "right": across, "above": -down, "below": down}[relation]
            aside = abs(down if relation in ("left", "right") else across)
            assert abs(way) > 1.7 * aside
            if answer in ("yes", "no") or len(things) == 2:
                assert (way > 0) == (answer != "no"), turn


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("maker", [shapes.make_shape_color, shapes.make_yes_no, shapes.make_scene])
def test_colors_and_existence_are_those_of_the_canvas(maker: mixture.Maker, split: Split) -> None:
    for sample in make(maker, split, seed=2):
        things = see(sample)
        for turn in sample.turns:
            question, answer = american(turn.question), turn.answer.rstrip(".").lower()
            absent = answer.removeprefix("there is no ")
            if answer in COLOURS:
                matches = [m for m in _REFERENCE.findall(question) if m[1] in SHAPES]
                found = find(things, "", matches[0][1]) if matches else things
                assert [thing.colour for thing in found] == [answer], turn
            elif absent in SHAPES:
                assert not find(things, "", absent), turn
            elif len(answer.split()) == 2 and answer.split()[1] in SHAPES:
                assert find(things, "", answer.split()[1]), turn
            elif answer in ("yes", "no") and re.search(
                r"(is there|see|show|contain|find) an? ", question
            ):
                found = find(things, *_REFERENCE.findall(question)[0])
                assert bool(found) == (answer == "yes"), turn


@pytest.mark.parametrize("split", SPLITS)
def test_words_and_numbers_are_held_out_by_split_and_fit(split: Split) -> None:
    for maker, key in ((reading.make_words, "word"), (reading.make_digits, "digits")):
        for sample in make(maker, split):
            canvas = sample.picture
            assert canvas is not None
            texts = [turn.answer for turn in sample.turns if not turn.answer.endswith(".")]
            for part in texts[0].split():
                if not (key == "digits" and len(part) == 1):
                    assert is_held_out(key, part.lower()) == (split == "test"), part
            for sprite in canvas.sprites:
                if sprite.kind == "line":
                    assert sprite.x - sprite.width / 2 > -2
                    assert sprite.x + sprite.width / 2 < 226
            fonts = {int(line.coverage[0, 0]) for line in canvas.lines}
            assert fonts <= set(reading.TRAIN_FONTS)


def test_the_lines_of_a_notice_are_asked_for_by_their_places() -> None:
    seen = Counter[str]()
    for sample in make(notices.make_notice, "train"):
        canvas = sample.picture
        assert canvas is not None
        lines = [sprite for sprite in canvas.sprites if sprite.kind == "line"]
        assert [sprite.number for sprite in lines] == list(range(len(canvas.lines)))
        for one, other in pairwise(lines):
            assert one.y + one.height / 2 <= other.y - other.height / 2 + 1e-6
        for turn in sample.turns:
            for part in turn.answer.split():
                key = "word" if part.isalpha() else "digits"
                assert len(part) == 1 or not is_held_out(key, part.lower()), part
            seen.update(
                place for place in PLACES_OF_LINES if f"{place} line" in turn.question.lower()
            )
    assert set(seen) == PLACES_OF_LINES


def test_font_can_be_chosen() -> None:
    for maker in (reading.make_words_in_unseen_font, reading.make_digits_in_unseen_font):
        for sample in make(maker, "test"):
            assert sample.picture is not None
            fonts = {int(line.coverage[0, 0]) for line in sample.picture.lines}
            assert fonts <= set(reading.HELD_OUT_FONTS)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("maker", [emoji.make_emoji, emoji.make_emoji_scene])
def test_emoji_are_named_and_stand_in_cells_of_their_split(
    maker: mixture.Maker, split: Split
) -> None:
    for sample in make(maker, split):
        assert sample.picture is not None
        sprites = [s for s in sample.picture.sprites if s.kind == "emoji"]
        for sprite in sprites:
            cell = int(sprite.y * 3 / 224) * 3 + int(sprite.x * 3 / 224)
            assert cell in emoji.CELLS_OF[split][sprite.number]
        if maker is emoji.make_emoji:
            name = EMOJI_NAMES[sprites[0].number // 2]
            assert sample.turns[0].answer.lower() == emoji.phrase_of(name) + "."


@pytest.mark.parametrize("split", SPLITS)
def test_motion_goes_where_the_answer_says(split: Split) -> None:
    for sample in make(video.make_direction, split):
        assert sample.video is not None
        first, last = sample.video[0].sprites[-1], sample.video[-1].sprites[-1]
        across, down = last.x - first.x, last.y - first.y
        words = [
            ("up" if down < 0 else "down") if abs(down) > 20 else "",
            ("left" if across < 0 else "right") if abs(across) > 20 else "",
        ]
        direction = " and to the ".join(word for word in words if word)
        assert direction in [turn.answer.rstrip(".").lower() for turn in sample.turns]
        thing = Seen(first, (112, 112))
        is_kept = is_held_out("motion", f"{thing.colour} {thing.shape}", direction)
        assert is_kept == (split == "test")


@pytest.mark.parametrize("split", SPLITS)
def test_sums_are_right_and_held_out_by_split(split: Split) -> None:
    values = {spoken.number_in_words(number): number for number in range(101)}
    for sample in make(spoken.make_spoken_arithmetic, split):
        said = re.sub(r"^(what is|how much is|tell me what is) ", "", sample.speech or "")
        first, word, second = re.split(r" (plus|minus|times) ", said)
        a, b = values[first], values[second]
        result = {"plus": a + b, "minus": a - b, "times": a * b}[word]
        assert values[sample.turns[0].answer.rstrip(".").lower()] == result
        assert is_held_out("sum", a, word, b) == (split == "test")
    for sample in make(text.make_sum, split):
        question = sample.turns[0].question
        match = re.search(r"(\d+) ?(\+|-|\*|x|plus|minus|times) ?(\d+)", question)
        assert match
        a, b = int(match[1]), int(match[3])
        result = {"+": a + b, "p": a + b, "-": a - b, "m": a - b}.get(match[2][0], a * b)
        assert sample.turns[0].answer == f"{result}."


@pytest.mark.parametrize("split", SPLITS)
def test_speech_without_a_question_is_transcribed(split: Split) -> None:
    for sample in make(spoken.make_heard, split):
        assert sample.turns[0].answer == sample.speech
        assert sample.turns[0].question == ""
        assert is_test_sentence(sample.speech or "") == (split == "test")


def test_questions_are_worded_in_many_ways() -> None:
    for name, phrases in vars(wordings).items():
        if isinstance(phrases, wordings.Phrases):
            assert 5 <= len(set(phrases.templates)) <= 20, name


def test_mixture_makes_all_groups() -> None:
    random = randomness.Random(0)
    for group, makers in mixture.MIXTURE.items():
        tasks = {mixture.make_sample(random, group, SIZE).task for _ in range(300)}
        assert len(tasks) >= min(2, len(makers))
