"""What is said, as text: lower-case words of the closed vocabulary, ten at most.

A quarter are random strings of words, so that every word meets every other; the rest are filled-in
patterns. One sentence in eight is kept for the test, and so is everything that people say in the
recordings of `test_voices`: training never speaks those.
"""

from __future__ import annotations

import random as random_module
from collections.abc import Callable

from training.samples import Split, is_held_out
from training.speech import words
from training.speech.words import VOCABULARY

__all__ = [
    "HUMAN_SENTENCES",
    "VOCABULARY",
    "fill",
    "is_test_sentence",
    "make_any_sentence",
    "make_sentence",
    "number_in_words",
]

Random = random_module.Random

HUMAN_SENTENCES = frozenset(
    (
        "ten of clubs",
        "four queen of clubs",
        "seven of clubs",
        "five five",
        "eight of spades four of clubs seven of hearts",
        "go forward ten meters",
        "he was not an ill disposed young man",
        "he might even have been made amiable himself",
        "unless to be rather cold hearted and rather selfish is to be ill disposed",
        "and mister john dashwood had then leisure to consider how much there might be prudently "
        "in his power to do for them",
        "had he married a more a amiable woman he might have been made still more respectable "
        "than he was",
    )
)

PICTURE_QUESTIONS = (
    "what color is the {shape}",
    "what color is the {size} {shape}",
    "what color is this",
    "which color is it",
    "what shape is this",
    "what shape is {color}",
    "what shape is at the {side}",
    "how many {shapes} are there",
    "how many {color} {shapes} are there",
    "how many {shapes} can you see",
    "how many things are there",
    "count the {shapes}",
    "count the {color} {shapes}",
    "is there a {color} {shape}",
    "is there a {shape}",
    "is the {shape} {color}",
    "is the {shape} {relation} the {shape}",
    "is the {color} {shape} {relation} the {color} {shape}",
    "what is {relation} the {color} {shape}",
    "what is {relation} the {shape}",
    "what is in the {side}",
    "what is in the {side} {side}",
    "where is the {shape}",
    "where is the {color} {shape}",
    "what does it say",
    "what is written here",
    "what number is this",
    "what word is this",
    "which letter is it",
    "read the word",
    "read the number please",
    "what is this",
    "what is in the picture",
    "what do you see",
    "what can you hear",
    "which way does it move",
    "which way does the {shape} move",
    "where does the {color} {shape} go",
    "is it moving {direction}",
    "what moves in the video",
    "are there more {shapes} than {shapes}",
    "is the {color} {shape} big or small",
    "which is {size} the {shape} or the {shape}",
)
ARITHMETIC = (
    "what is {number} plus {number}",
    "what is {number} minus {number}",
    "what is {number} times {number}",
    "what is {number} divided by {digit}",
    "how much is {number} plus {number}",
    "{number} plus {number} equals {number}",
    "is {number} more than {number}",
)
COMMANDS = (
    "go {direction} {number} {distance}",
    "go {direction}",
    "turn {direction}",
    "turn {direction} and go {direction}",
    "turn around and come back",
    "stop",
    "stop now please",
    "start again",
    "wait {number} {unit}",
    "move the {color} {shape} to the {side}",
    "put the {thing} on the {thing}",
    "take the {color} {thing}",
    "give me the {thing} please",
    "look {direction}",
    "listen to me",
    "come here",
    "walk to the {place}",
    "find the {color} {thing}",
    "show me the {shape}",
    "turn on the {device} in the {room}",
    "turn off the {device} in the {room}",
    "turn the {device} off",
    "turn the {device} on please",
    "set a timer for {number} {unit}",
    "set an alarm for {number} in the {daytime}",
    "set the temperature to {number} degrees",
    "set the volume to {number} percent",
    "play music in the {room}",
    "play the next song",
    "pause the music",
    "open the {opening}",
    "close the {opening} in the {room}",
    "call my {person}",
    "make it {adjective}",
    "repeat that please",
    "a little louder please",
    "a little slower",
    "be quiet",
    "tell me the time",
)
EVERYDAY = (
    "hello how are you",
    "hi my name is john",
    "good {daytime} {person}",
    "thank you very much",
    "thanks i am fine",
    "yes please",
    "no thanks",
    "you are welcome",
    "i am sorry",
    "goodbye my friend",
    "what is the weather like today",
    "is it {weather} tomorrow",
    "it is {weather} and {weather} today",
    "it was {weather} on {day}",
    "what time is it",
    "what day is it today",
    "i like {food} and {food}",
    "i want some {food} and a {thing}",
    "we have {number} {animals}",
    "the {animal} and the {animal} are {adjective}",
    "my {person} has a {adjective} {animal}",
    "her {person} and his {person} work in the {place}",
    "they know your {person}",
    "can you hear the {animal}",
    "does the {animal} like {food}",
    "we eat {food} every {day}",
    "she has {number} {color} {animals}",
    "the {thing} is {relation} the {thing}",
    "our {place} is near the {place}",
    "the {color} {thing} is in the {room}",
    "there is a {animal} behind the {thing}",
    "he had a {adjective} {thing}",
    "he might have been a {adjective} man",
    "she is rather {adjective} and not {adjective}",
    "they have been in the {place} before",
    "there might be a {animal} in the {place}",
    "who is the {adjective} {person}",
    "why is the {animal} so {adjective}",
    "i think it is too {weather}",
    "let me help you with the {thing}",
    "an old {thing} is made for them",
)
DATES = (
    "{day}",
    "{day} {month} {ordinal}",
    "{month} {number}",
    "the {ordinal} of {month}",
    "{day} the {ordinal} of {month}",
    "on {day} at {number}",
    "from {day} to {day}",
    "it is {number} on {day} {daytime}",
    "today is {day} the {ordinal}",
    "in {number} {unit}",
    "{number} {unit} and {number} {unit}",
)
NOVEL = (  # the words of the recordings, in other sentences
    "mister {novel} had {novel} and {novel}",
    "he was {novel} and {novel}",
    "he had been rather {novel}",
    "she might be more {novel} than he was",
    "he married a {novel} woman",
    "unless he is {novel} himself",
    "then there is still {novel} power",
    "to be {novel} is to be {novel}",
    "how much {novel} might there be for them",
    "they have even made him {novel}",
    "the young man was not {novel}",
)
PATTERNS = (*PICTURE_QUESTIONS, *COMMANDS, *EVERYDAY, *ARITHMETIC, *DATES, *NOVEL)
CARD = ("{rank} of {suit}", "{rank} {suit}")

SLOTS: dict[str, tuple[str, ...]] = {
    "color": words.COLOURS,
    "shape": words.SHAPES,
    "shapes": words.PLURAL_SHAPES,
    "side": words.SIDES,
    "relation": words.RELATIONS,
    "size": words.SIZES,
    "direction": words.DIRECTIONS,
    "distance": words.DISTANCES,
    "digit": words.DIGITS,
    "ordinal": words.ORDINALS,
    "device": words.DEVICES,
    "room": words.ROOMS,
    "opening": words.OPENINGS,
    "person": words.FAMILY,
    "place": words.PLACES,
    "thing": words.THINGS,
    "animal": words.ANIMALS,
    "animals": words.PLURAL_ANIMALS,
    "food": words.FOOD,
    "weather": words.WEATHER,
    "adjective": words.ADJECTIVES,
    "day": words.DAYS,
    "month": words.MONTHS,
    "unit": words.UNITS,
    "daytime": ("morning", "evening", "night"),
    "rank": words.RANKS,
    "suit": words.SUITS,
    "novel": words.split(
        "ill disposed hearted selfish married amiable made still respectable prudently leisure "
        "himself consider power dashwood cold young"
    ),
}


def number_in_words(number: int) -> str:
    """Return a number from 0 to 199 in words."""
    if number >= 100:
        rest = number - 100
        return "one hundred" + (f" {number_in_words(rest)}" if rest else "")
    if number < 10:
        return words.DIGITS[number]
    if number < 20:
        return words.TEENS[number - 10]
    tens, ones = divmod(number, 10)
    return words.TENS[tens - 2] + (f" {words.DIGITS[ones]}" if ones else "")


def is_test_sentence(sentence: str) -> bool:
    """Return whether training must not use this sentence for transcription."""
    return sentence in HUMAN_SENTENCES or is_held_out("speech", sentence)


def fill(pattern: str, random: Random) -> str:
    """Return the pattern with a word in each of its slots."""
    return " ".join(
        word if word[0] != "{" else _slot(word[1:-1], random) for word in pattern.split()
    )


def _slot(name: str, random: Random) -> str:
    if name == "number":
        return number_in_words(
            random.randrange(21) if random.random() < 0.6 else random.randrange(200)
        )
    return random.choice(SLOTS[name])


def _random_words(random: Random) -> str:
    return " ".join(random.choices(words.WORDS_OF_RANDOM_STRINGS, k=random.randint(1, 9)))


def _digits(random: Random) -> str:
    return " ".join(random.choices(words.DIGITS, k=random.randint(2, 10)))


def _cards(random: Random) -> str:
    kind = random.random()
    if kind < 0.1:
        return " ".join(random.choices(words.RANKS, k=2))
    if kind < 0.25:
        return fill("{rank} {rank} of {suit}", random)
    return " ".join(fill(random.choice(CARD), random) for _ in range(random.randint(1, 3)))


def _of(patterns: tuple[str, ...]) -> Callable[[Random], str]:
    return lambda random: fill(random.choice(patterns), random)


LONG_SHARE = 0.12
MAX_WORDS = 22
KINDS: dict[str, tuple[float, Callable[[Random], str]]] = {
    "random words": (25.0, _random_words),
    "picture questions": (18.0, _of(PICTURE_QUESTIONS)),
    "commands": (15.0, _of(COMMANDS)),
    "everyday": (12.0, _of(EVERYDAY)),
    "digits": (10.0, _digits),
    "cards": (6.0, _cards),
    "arithmetic": (6.0, _of(ARITHMETIC)),
    "dates": (5.0, _of(DATES)),
    "novel": (3.0, _of(NOVEL)),
}
_MAKERS = [make for _, make in KINDS.values()]
_WEIGHTS = [weight for weight, _ in KINDS.values()]


def make_sentence(random: Random, split: Split) -> str:
    """Return a sentence of one to ten words, in training at times up to `MAX_WORDS`.

    No sentence is in both splits, nor a part of a long one.
    """
    while True:
        sentence = make_any_sentence(random)
        is_long = split == "train" and random.random() < LONG_SHARE
        if is_test_sentence(sentence) != (split == "test"):
            continue
        if is_long:
            sentence = _go_on(sentence, random)
        elif sentence.count(" ") >= 10:
            continue
        if is_test_sentence(sentence) == (split == "test"):
            return sentence


def make_any_sentence(random: Random) -> str:
    """Return a sentence of either split."""
    (make,) = random.choices(_MAKERS, _WEIGHTS)
    return make(random)


def _go_on(sentence: str, random: Random) -> str:
    """Add other sentences without a pause, up to a drawn number of words."""
    num_words = random.randint(11, MAX_WORDS)
    while sentence.count(" ") < num_words - 1:
        other = make_any_sentence(random)
        if not is_test_sentence(other):
            sentence += " " + other
    return " ".join(sentence.split(" ")[:num_words])
