"""Tasks in which something is said: to be transcribed, or a question about a picture."""

from __future__ import annotations

import random as randomness
from collections.abc import Callable

from training.pictures.emoji_names import EMOJI_NAMES
from training.samples import Canvas, Sample, Size, Split, Turn, is_held_out
from training.speech.sentences import VOCABULARY, make_sentence, number_in_words
from training.tasks import emoji, reading, shapes
from training.tasks.facts import NO_PICTURE, SPOKEN_FACTS
from training.tasks.palette import COLOURS
from training.tasks.phrasing import Phrases
from training.tasks.scenes import (
    CELLS,
    NUMBERS,
    PLURALS,
    SEEN_PAIRS,
    SHAPES,
    Scene,
    make_things,
    sentence,
    with_article,
)
from training.tasks.shape_questions import breaks_count, choose, describe

Random = randomness.Random
_WORDS = frozenset(VOCABULARY)
_QUESTION_STARTS = frozenset(
    (
        *("what", "which", "where", "how", "who", "when", "why", "is", "are", "was", "does", "do"),
        *("can", "count", "read", "tell", "say"),
    )
)
TRANSCRIBE = Phrases(
    "Write down what you hear.",
    "What was said?",
    "What do you hear?",
    "Transcribe this.",
    "Transcribe the audio.",
    "Transcribe the speech.",
    "What did I say?",
    "What does the speaker say?",
    "Write down the words.",
    "What is being said?",
    "Please transcribe.",
    "Type what you hear.",
    "Which words do you hear?",
    "What is said in the recording?",
    "Listen and write.",
)


def make_transcription(random: Random, _: Size, split: Split) -> Sample:
    """Speech, and the instruction to write it down."""
    said = make_sentence(random, split)
    return Sample("speech", [Turn(TRANSCRIBE.ask(random), said)], speech=said)


def _is_question(said: str) -> bool:
    return said.split(" ", 1)[0] in _QUESTION_STARTS or said in _ANSWERED


_ANSWERED = frozenset(said for questions, _ in SPOKEN_FACTS for said in questions)


def make_heard(random: Random, _: Size, split: Split) -> Sample:
    """A statement without any instruction: it is transcribed."""
    while True:
        said = make_sentence(random, split)
        if not _is_question(said):
            return Sample("heard", [Turn("", said)], speech=said)


def make_spoken_arithmetic(random: Random, _: Size, split: Split) -> Sample:
    """A sum that is said."""
    while True:
        kind = random.random()
        if kind < 0.5:
            a, b = int(random.random() * 21), int(random.random() * 21)
            word, result = "plus", a + b
        elif kind < 0.8:
            a = int(random.random() * 21)
            b = int(random.random() * (a + 1))
            word, result = "minus", a - b
        else:
            a, b = int(random.random() * 11), int(random.random() * 11)
            word, result = "times", a * b
        if is_held_out("sum", a, word, b) == (split == "test"):
            break
    start = _pick(random, "what is", "how much is", "tell me what is")
    said = f"{start} {number_in_words(a)} {word} {number_in_words(b)}"
    return Sample("spoken_sum", [Turn("", sentence(number_in_words(result)))], speech=said)


def make_spoken_fact(random: Random, _: Size, split: Split) -> Sample:
    """What needs no picture, or lacks it."""
    if random.random() < 0.25:
        scene = make_things(random, (224, 224), split, 3)
        return Sample("spoken_fact", [Turn("", NO_PICTURE)], speech=_ask_any(random, scene, split))
    questions, answer = SPOKEN_FACTS[int(random.random() * len(SPOKEN_FACTS))]
    said = questions[int(random.random() * len(questions))]
    return Sample("spoken_fact", [Turn("", answer)], speech=said)


def _ask_any(random: Random, scene: Scene, split: Split) -> str:
    while True:
        turn = _KINDS[int(random.random() * len(_KINDS))](random, scene, split)
        if turn is not None:
            return turn.question


def _pick(random: Random, *patterns: str) -> str:
    return patterns[int(random.random() * len(patterns))]


def _say_what(random: Random, scene: Scene, _: Split) -> Turn | None:
    answer = describe(scene)
    if answer is None:
        return None
    said = _pick(random, "what is this", "what do you see", "what is in the picture", "what is it")
    return Turn(said, answer)


def _say_color(random: Random, scene: Scene, _: Split) -> Turn | None:
    thing = choose(random, scene)
    answer = sentence(COLOURS[thing.colour])
    if len(scene.things) == 1 and random.random() < 0.5:
        return Turn(
            _pick(random, "what color is this", "what color is it", "which color is it"), answer
        )
    if len(scene.with_shape(thing.shape)) > 1:
        return None
    pattern = _pick(
        random,
        "what color is the {}",
        "which color is the {}",
        "what is the color of the {}",
        "tell me the color of the {}",
    )
    return Turn(pattern.format(SHAPES[thing.shape]), answer)


def _say_shape(random: Random, scene: Scene, _: Split) -> Turn | None:
    thing = choose(random, scene)
    answer = sentence(with_article(SHAPES[thing.shape]))
    if len(scene.things) == 1 and random.random() < 0.5:
        return Turn(
            _pick(random, "what shape is this", "what shape is it", "which shape is it"), answer
        )
    if len(scene.with_colour(thing.colour)) > 1:
        return None
    pattern = _pick(random, "what shape is {}", "which shape is {}", "what shape is the {} thing")
    return Turn(pattern.format(COLOURS[thing.colour]), answer)


def _say_count(random: Random, scene: Scene, split: Split) -> Turn | None:
    thing = choose(random, scene)
    shape, colour = thing.shape, thing.colour
    kind = int(random.random() * 4)
    if kind == 0:
        things, matching = "things", scene.things
    elif kind == 1:
        things, matching = PLURALS[shape], scene.with_shape(shape)
    elif kind == 2:
        things, matching = f"{COLOURS[colour]} things", scene.with_colour(colour)
    else:
        if random.random() < 0.3:
            shape, colour = SEEN_PAIRS[int(random.random() * len(SEEN_PAIRS))]
        things = f"{COLOURS[colour]} {PLURALS[shape]}"
        matching = scene.with_pair(shape, colour)
    if split == "train" and breaks_count(matching, shape, colour):
        return None
    pattern = _pick(
        random,
        "how many {} are there",
        "how many {} can you see",
        "how many {} do you see",
        "count the {}",
    )
    return Turn(pattern.format(things), sentence(NUMBERS[len(matching)]))


def _say_position(random: Random, scene: Scene, _: Split) -> Turn | None:
    thing = choose(random, scene)
    if not scene.is_well_inside(thing) or len(scene.with_pair(thing.shape, thing.colour)) > 1:
        return None
    is_only_one = len(scene.with_shape(thing.shape)) == 1
    name = SHAPES[thing.shape] if is_only_one and random.random() < 0.5 else thing.name
    pattern = _pick(random, "where is the {}", "where is the {} in the picture")
    return Turn(pattern.format(name), sentence(CELLS[thing.cell]))


def _say_exists(random: Random, scene: Scene, _: Split) -> Turn | None:
    thing = choose(random, scene)
    shape, colour = thing.shape, thing.colour
    if random.random() < 0.5:
        shape, colour = SEEN_PAIRS[int(random.random() * len(SEEN_PAIRS))]
    if random.random() < 0.4:
        name, found = SHAPES[shape], scene.with_shape(shape)
    else:
        name, found = f"{COLOURS[colour]} {SHAPES[shape]}", scene.with_pair(shape, colour)
    pattern = _pick(random, "is there {}", "do you see {}", "can you see {}")
    return Turn(pattern.format(with_article(name)), "Yes." if found else "No.")


_KINDS: tuple[Callable[[Random, Scene, Split], Turn | None], ...] = (
    *(_say_what, _say_color, _say_shape, _say_count, _say_position, _say_exists),
)


def _about_shapes(random: Random, size: Size, split: Split) -> tuple[Turn, Canvas, list[Turn]]:
    while True:
        count = 1 + int(random.random() * 4)
        if random.random() < 0.3:
            scene = shapes.make_countable(random, size, split) or Scene(*size)
        else:
            scene = make_things(random, size, split, count)
        if not scene.things:
            continue
        turn = _KINDS[int(random.random() * len(_KINDS))](random, scene, split)
        canvas = None if turn is None else scene.draw(random)
        if turn is None or canvas is None:
            continue
        more: list[Turn] = []
        if split == "train":
            more = shapes.ask_all_kinds(random, scene, split, int(random.random() * 3))
        return turn, canvas, more


def _about_number(random: Random, size: Size, split: Split) -> tuple[Turn, Canvas, list[Turn]]:
    text = reading.choose_number(random, split)
    said = _pick(
        random,
        "read the number",
        "read the number please",
        "what number is this",
        "which number is it",
        "what does it say",
        "what is written here",
    )
    return Turn(said, text), reading.draw_number(random, size, text), []


def _about_emoji(random: Random, size: Size, split: Split) -> tuple[Turn, Canvas, list[Turn]]:
    sample = emoji.make_emoji(random, size, split)
    said = _pick(random, "what is this", "what do you see", "what is it", "what is in the picture")
    answer = sample.turns[0].answer
    canvas = sample.picture or Canvas()
    if random.random() < 0.2:
        concept = canvas.sprites[-1].number // emoji.NUM_STYLES
        name = EMOJI_NAMES[concept]
        if name in _WORDS:
            said = f"is this {emoji.PHRASES[concept]}"
            return Turn(said, "Yes."), canvas, []
    return Turn(said, answer), canvas, sample.turns[1:]


def make_spoken_question(random: Random, size: Size, split: Split) -> Sample:
    """A picture and a question that is said."""
    chance = random.random()
    about = _about_shapes if chance < 0.7 else _about_number if chance < 0.82 else _about_emoji
    turn, canvas, more = about(random, size, split)
    turns = [Turn("", turn.answer), *more]
    return Sample("spoken_question", turns, picture=canvas, speech=turn.question)
