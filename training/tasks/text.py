"""Tasks of text alone: small sums, letters, order, facts about itself, and polite refusals."""

from __future__ import annotations

import random as randomness
from collections.abc import Callable

from training.samples import Sample, Size, Split, Turn, is_held_out
from training.tasks import video_wordings, wordings
from training.tasks.facts import (
    DAYS,
    FACTS,
    MONTHS,
    NO_PICTURE,
    NO_SOUND,
    NO_VIDEO,
    OPPOSITES,
    SLOTS,
    UNKNOWN,
    UNKNOWN_QUESTIONS,
)
from training.tasks.palette import COLOURS
from training.tasks.phrasing import Phrases, vary
from training.tasks.reading import WORDS
from training.tasks.scenes import NUMBERS, PLURALS, SHAPES, sentence, with_article

Random = randomness.Random
_OPPOSITE: dict[str, str] = {}
for _pair in OPPOSITES.split(","):
    _one, _other = _pair.split()
    _OPPOSITE.setdefault(_one, _other)
    _OPPOSITE.setdefault(_other, _one)
_OPPOSITES = tuple(_OPPOSITE.items())

_SUM = Phrases(
    *("What is {a} {sign} {b}?", "{a} {sign} {b}", "{a} {sign} {b} =", "Calculate {a} {sign} {b}."),
    *("How much is {a} {sign} {b}?", "{a} {word} {b}", "What is {a} {word} {b}?", "{a}{sign}{b}"),
    *("Compute {a} {sign} {b}.", "How much is {a} {word} {b}?", "{a}{sign}{b}=?"),
)
_LARGER = Phrases(
    *(
        "Which is larger, {a} or {b}?",
        "Which number is bigger: {a} or {b}?",
        "What is more, {a} or {b}?",
    ),
    *(
        "Is {a} or {b} the larger number?",
        "Which one is greater, {a} or {b}?",
        "Larger: {a} or {b}?",
    ),
)
_AFTER_NUMBER = Phrases(
    *(
        "What comes after {a}?",
        "Which number comes after {a}?",
        "What is the next number after {a}?",
    ),
    *("Count on from {a}.", "Which number follows {a}?", "What follows {a}?"),
)
_EVEN = Phrases(
    *("Is {a} even or odd?", "Even or odd: {a}?", "Is the number {a} odd or even?"),
    *("Tell me if {a} is even or odd.", "Is {a} an even or an odd number?", "{a}: even or odd?"),
)
_COPY = Phrases(
    *("Repeat: {text}", "Repeat after me: {text}", "Say: {text}", "Copy this: {text}"),
    *("Please repeat: {text}", "Write: {text}", "Echo: {text}", "Say exactly this: {text}"),
)
_SORT = Phrases(
    *(
        "Sort: {items}",
        "Sort these {kind}: {items}",
        "Put in order: {items}",
        "Order these: {items}",
    ),
    *("Please sort {items}", "Sort the {kind} {items}", "Arrange these {kind}: {items}"),
)
_REVERSE = Phrases(
    *('Reverse the word "{word}".', "Reverse: {word}", "Spell {word} backwards."),
    *("Write {word} backwards.", "What is {word} backwards?", 'Turn "{word}" around.'),
)
_SPELL = Phrases(
    *("Spell {word}.", "Spell the word {word}.", "How do you spell {word}?", "Spell: {word}"),
    *("Please spell {word}.", 'Spell "{word}" for me.'),
)
_LETTERS = Phrases(
    *("How many letters are in {word}?", "How many letters does {word} have?"),
    *("Count the letters of {word}.", 'How many letters has the word "{word}"?'),
    *("How long is the word {word}?", "Number of letters in {word}?"),
)
_FIRST = Phrases(
    *("What is the first letter of {word}?", "Which letter does {word} start with?"),
    *("First letter of {word}?", 'What letter comes first in "{word}"?'),
    *("Tell me the first letter of {word}.", "With which letter does {word} begin?"),
)
_OPPOSITE_OF = Phrases(
    *(
        "What is the opposite of {word}?",
        "Opposite of {word}?",
        'What is the opposite of "{word}"?',
    ),
    *(
        "Name the opposite of {word}.",
        "What's the opposite of {word}?",
        "The opposite of {word} is?",
    ),
)
_AFTER = Phrases(
    *(
        "Which {kind} comes after {item}?",
        "What {kind} comes after {item}?",
        "What comes after {item}?",
    ),
    *(
        "Which {kind} follows {item}?",
        "What is the {kind} after {item}?",
        "Next {kind} after {item}?",
    ),
)
_BEFORE = Phrases(
    *("Which {kind} comes before {item}?", "What {kind} comes before {item}?"),
    *("What comes before {item}?", "What is the {kind} before {item}?", "{kind} before {item}?"),
    "Name the {kind} before {item}.",
)
_HEAR = Phrases(
    *("What do you hear?", "What was said?", "Write down what you hear.", "What did I say?"),
    *("Transcribe the audio.", "What does the speaker say?", "Transcribe this recording."),
    *("What is in the recording?", "Listen to this.", "What sound is this?", "Who is speaking?"),
)


def _number(random: Random, top: int) -> int:
    return int(random.random() * (top + 1))


def _ask_sum(random: Random, split: Split) -> Turn:
    while True:
        kind = random.random()
        if kind < 0.45:
            a = _number(random, 99)
            b = _number(random, 99 - a)
            sign, word, result = "+", "plus", a + b
        elif kind < 0.8:
            a = _number(random, 99)
            b = _number(random, a)
            sign, word, result = "-", "minus", a - b
        else:
            a, b = _number(random, 10), _number(random, 10)
            sign, word, result = random.choice(("*", "x")), "times", a * b
        if is_held_out("sum", a, word, b) == (split == "test"):
            question = _SUM.ask(random, a=str(a), b=str(b), sign=sign, word=word)
            return Turn(question, f"{result}.")


def _ask_number(random: Random, _: Split) -> Turn:
    a, b = _number(random, 99), _number(random, 99)
    kind = int(random.random() * 3)
    if kind == 0 and a != b:
        return Turn(_LARGER.ask(random, a=str(a), b=str(b)), f"{max(a, b)}.")
    if kind == 1:
        return Turn(_AFTER_NUMBER.ask(random, a=str(a)), f"{a + 1}.")
    return Turn(_EVEN.ask(random, a=str(a)), "Odd." if a % 2 else "Even.")


def _word(random: Random, split: Split, longest: int = 9) -> str:
    words = WORDS[split]
    while True:
        word = words[int(random.random() * len(words))]
        if len(word) <= longest:
            return word


def _ask_copy(random: Random, split: Split) -> Turn:
    if random.random() < 0.3:
        text = str(_number(random, 10 ** (1 + int(random.random() * 6))))
    else:
        words = [_word(random, split) for _ in range(1 + int(random.random() * 4))]
        text = " ".join(words)
        if random.random() < 0.4:
            text = text.capitalize()
    template = _COPY.templates[int(random.random() * len(_COPY.templates))]
    return Turn(template.format(text=text), text)


def _ask_sort(random: Random, split: Split) -> Turn:
    count = 2 + int(random.random() * 4)
    if random.random() < 0.6:
        numbers = random.sample(range(100 if random.random() < 0.6 else 10), count)
        kind, items = "numbers", [str(number) for number in numbers]
        result = [str(number) for number in sorted(numbers)]
    else:
        kind, items = "words", [_word(random, split, 6) for _ in range(min(count, 3))]
        result = sorted(items)
    template = _SORT.templates[int(random.random() * len(_SORT.templates))]
    return Turn(template.format(items=", ".join(items), kind=kind), ", ".join(result))


def _ask_letters(random: Random, split: Split) -> Turn:
    kind = int(random.random() * 4)
    word = _word(random, split, 5 if kind == 0 else 9)
    if kind == 0:
        return Turn(_REVERSE.ask(random, word=word), word[::-1])
    if kind == 1:
        return Turn(_LETTERS.ask(random, word=word), sentence(NUMBERS[len(word)]))
    if kind == 2:
        return Turn(_SPELL.ask(random, word=word), " ".join(word.upper()))
    return Turn(_FIRST.ask(random, word=word), word[0].upper() + ".")


def _ask_opposite(random: Random, _: Split) -> Turn:
    word, opposite = _OPPOSITES[int(random.random() * len(_OPPOSITES))]
    return Turn(_OPPOSITE_OF.ask(random, word=word), sentence(opposite))


def _ask_order(random: Random, _: Split) -> Turn:
    kind, items = (("day", DAYS), ("month", MONTHS))[int(random.random() * 2)]
    number = int(random.random() * len(items))
    step = 1 if random.random() < 0.5 else -1
    phrases = _AFTER if step > 0 else _BEFORE
    answer = items[(number + step) % len(items)]
    return Turn(phrases.ask(random, kind=kind, item=items[number]), sentence(answer))


def ask_fact(random: Random, _: Split) -> Turn:
    """Ask about the model itself, or greet it."""
    questions, answer = FACTS[int(random.random() * len(FACTS))]
    question = questions[int(random.random() * len(questions))]
    return Turn(vary(random, question) if question[-1] in "?." else question, answer)


def _ask_unknown(random: Random, split: Split) -> Turn:
    template = UNKNOWN_QUESTIONS[int(random.random() * len(UNKNOWN_QUESTIONS))]
    fields = {
        name: words[int(random.random() * len(words))]
        for name, words in SLOTS.items()
        if f"{{{name}}}" in template
    }
    if "{topic}" in template:
        topic = _word(random, split)
        fields["topic"] = f"the {topic}" if random.random() < 0.4 else topic
    if "{number}" in template:
        fields["number"] = str(_number(random, 999))
    return Turn(vary(random, template.format(**fields)), UNKNOWN)


def _ask_missing(random: Random, _: Split) -> Turn:
    """Ask about a picture, recording or video that was not sent."""
    chance = random.random()
    if chance < 0.25:
        return Turn(_HEAR.ask(random), NO_SOUND)
    shape, colour = random.choice(SHAPES), random.choice(COLOURS)
    if chance < 0.4:
        phrases = random.choice((video_wordings.HAPPENS, video_wordings.DIRECTION))
        question = phrases.ask(random, shape=shape)
        return Turn(question, NO_VIDEO)
    kind = int(random.random() * 7)
    if kind < 2:
        phrases = (wordings.WHAT, wordings.LIST, wordings.READ)[int(random.random() * 3)]
        return Turn(phrases.ask(random), NO_PICTURE)
    if kind == 2:
        return Turn(wordings.COLOR_OF.ask(random, thing=shape), NO_PICTURE)
    if kind == 3:
        return Turn(wordings.WHERE.ask(random, thing=f"{colour} {shape}"), NO_PICTURE)
    if kind == 4:
        things = random.choice((PLURALS[SHAPES.index(shape)], "things", f"{colour} things"))
        return Turn(wordings.COUNT.ask(random, things=things), NO_PICTURE)
    if kind == 5:
        thing = with_article(f"{colour} {shape}")
        return Turn(wordings.EXISTS.ask(random, thing=thing), NO_PICTURE)
    phrases = random.choice((wordings.COLOR_OF_IT, wordings.SHAPE_OF_IT, wordings.READ_NUMBER))
    return Turn(phrases.ask(random), NO_PICTURE)


_KINDS: tuple[tuple[Callable[[Random, Split], Turn], float], ...] = (
    (_ask_sum, 4.0),
    (_ask_number, 1.0),
    (_ask_copy, 2.0),
    (_ask_sort, 1.5),
    (_ask_letters, 2.0),
    (_ask_opposite, 1.0),
    (_ask_order, 0.6),
    (ask_fact, 2.5),
    (_ask_unknown, 2.5),
    (_ask_missing, 1.5),
)
_MAKERS = [ask for ask, _ in _KINDS]
_WEIGHTS = [weight for _, weight in _KINDS]


def make_text(random: Random, _: Size, split: Split) -> Sample:
    """One to three questions that need no media."""
    count = 1 if split == "test" else 1 + int(random.random() * 3)
    kinds = random.choices(_MAKERS, _WEIGHTS, k=count)
    return Sample("text", [ask(random, split) for ask in kinds])


def make_sum(random: Random, _: Size, split: Split) -> Sample:
    """A small sum, difference or product."""
    return Sample("sum", [_ask_sum(random, split)])
