from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from sensorium.speech.words import split_words

PIECES = [
    b" one",
    b"two",
    b" three",
    b",",
    b".",
    b" (",
    b")",
    b" -",
    b"'s",
    b" ",
    b"?!",
    b'"',
    b' "',
]
PIECES += [b"\xe6\x97", b"\xa5", "本".encode(), b" \xc3", b"\xa9", "。".encode(), b" \xc2\xbf"]


class ByteTokenizer:
    """A tokenizer with tokens that may be parts of characters."""

    eos_token_id = len(PIECES)

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return b"".join(PIECES[token_id] for token_id in token_ids).decode(errors="replace")


def read(text: bytes, language: str | None = "en") -> list[str]:
    token_ids = []
    while text:
        piece = max((each for each in PIECES if text.startswith(each)), key=len)
        token_ids.append(PIECES.index(piece))
        text = text[len(piece) :]
    return [span.text for span in split_words(token_ids, ByteTokenizer().decode, language)]


def test_words_start_with_spaces_and_keep_their_punctuation() -> None:
    assert read(b" onetwo, three. one's") == [" onetwo,", " three.", " one's"]


def test_opening_marks_belong_to_the_word_behind_them() -> None:
    assert read(b' one ( three) "two"') == [" one", " ( three)", ' "two"']


def test_languages_without_spaces_are_split_into_characters() -> None:
    text = "日本。".encode()
    assert read(text, "ja") == ["日", "本。"]
    assert read(text, "en") == ["日本。"]


def test_no_text_has_no_words() -> None:
    assert read(b"") == []


@given(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12), st.booleans())
def test_words_are_those_of_transformers(token_ids: list[int], is_japanese: bool) -> None:
    decode = ByteTokenizer().decode
    spans = split_words(token_ids, decode, "ja" if is_japanese else "en")
    assert [i for span in spans for i in range(span.start, span.stop)] == list(
        range(len(token_ids))
    )
    language = "japanese" if is_japanese else "english"
    words, _, indices = _combine_tokens_into_words(ByteTokenizer(), token_ids, language)
    if sum(map(len, indices)) < len(token_ids):
        return  # Transformers leaves out tokens of a character that is never completed.
    assert [span.text for span in spans if span.text] == words
    assert [list(range(span.start, span.stop)) for span in spans if span.text] == indices


@pytest.mark.parametrize("language", ["en", "ja"])
def test_a_character_that_is_never_completed_is_not_lost(language: str) -> None:
    assert "".join(read(b" one\xe6\x97", language)) == " one\ufffd"
