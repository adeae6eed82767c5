"""Separates sentences from random strings of words, which are much harder to transcribe."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from training.speech import sentences, words


def is_random_string(said: str) -> bool:
    """Return whether a sentence fits no pattern and is neither a number nor cards."""
    return _regular().fullmatch(said) is None


@cache
def _regular() -> re.Pattern[str]:
    slots = {name: _any_of(values) for name, values in sentences.SLOTS.items()}
    slots["number"] = _any_of(map(sentences.number_in_words, range(200)))
    rank, suit, digit = slots["rank"], slots["suit"], _any_of(words.DIGITS)
    card = f"{rank} (?:of )?{suit}"
    return re.compile(
        "|".join(
            (
                *(_fill(pattern, slots) for pattern in sentences.PATTERNS),
                *(f"{digit}(?: {digit})+", f"{rank} {rank}(?: of {suit})?"),
                f"{card}(?: {card})*",
            )
        )
    )


def _fill(pattern: str, slots: dict[str, str]) -> str:
    return " ".join(slots[word[1:-1]] if word[0] == "{" else word for word in pattern.split())


def _any_of(alternatives: Iterable[str]) -> str:
    return f"(?:{'|'.join(alternatives)})"
