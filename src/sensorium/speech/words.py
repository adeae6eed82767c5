"""Groups the tokens of a text into words, for which times are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sensorium.speech.languages import WITHOUT_SPACES

_BROKEN = "\ufffd"  # stands in a decoded text for bytes that are no whole character
_MARKS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_OPENING = "\"'“¡¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001 - full-width marks are meant


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """A text and its tokens [start, stop)."""

    text: str
    start: int
    stop: int

    def join(self, following: TokenSpan) -> TokenSpan:
        return TokenSpan(text=self.text + following.text, start=self.start, stop=following.stop)


def split_words(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str], language: str | None
) -> list[TokenSpan]:
    """Return the words of a text in order, each with its spaces and punctuation."""
    spans = _split_characters(token_ids, decode)
    if language not in WITHOUT_SPACES:  # else each such run of tokens is a word
        spans = _join_to_words(spans)
    return _join_punctuation(spans)


def _split_characters(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[TokenSpan]:
    """Return the shortest runs of tokens that have only whole characters."""
    whole = decode(token_ids)
    spans: list[TokenSpan] = []
    start = num_characters = 0
    for stop in range(1, len(token_ids) + 1):
        text = decode(token_ids[start:stop])
        position = num_characters + text.find(_BROKEN)
        # A broken character of the whole text counts as whole, because more tokens don't mend it.
        is_whole = _BROKEN not in text or whole[position : position + 1] in ("", _BROKEN)
        if is_whole or stop == len(token_ids):
            spans.append(TokenSpan(text=text, start=start, stop=stop))
            start = stop
            num_characters += len(text)
    return spans


def _join_to_words(spans: list[TokenSpan]) -> list[TokenSpan]:
    words: list[TokenSpan] = []
    for span in spans:
        begins_word = span.text.startswith(" ") or span.text.strip() in _MARKS
        if words and not begins_word:
            words[-1] = words[-1].join(span)
        else:
            words.append(span)
    return words


def _join_punctuation(spans: list[TokenSpan]) -> list[TokenSpan]:
    """Join opening marks to the word after them and closing marks to the word before them."""
    opened: list[TokenSpan] = []  # from the last to the first
    for span in reversed(spans):
        if opened and span.text.startswith(" ") and span.text.strip() in _OPENING:
            opened[-1] = span.join(opened[-1])
        else:
            opened.append(span)
    words: list[TokenSpan] = []
    for span in reversed(opened):
        if words and not words[-1].text.endswith(" ") and span.text in _CLOSING:
            words[-1] = words[-1].join(span)
        else:
            words.append(span)
    return words
