"""Refuses texts that can't fit into a context, before they are tokenised whole.

Tokenising costs microseconds and hundreds of bytes for each character, so a text of megabytes must
not reach the tokenizer only to be refused by its number of tokens. Two bounds stand before it:

  1. A text with more characters than the longest token has, times the context, can't fit.
  2. A text that is shorter, but long, is counted in pieces, until they have more tokens than the
     context holds. So a refusal costs no more than a prompt that fills the context.

A text that would fit is not refused. A tokenizer may drop characters (spaces, accents, unknown
ones), so the first bound never assumes a token shorter than `_MIN_LONGEST_TOKEN` characters. A cut
may change the tokens beside it, so the count leaves out `_TOKENS_AT_CUTS` of each piece: a word of
100 characters that a vocabulary lacks is one token as a whole, and up to 100 in pieces.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from sensorium.multimodal.processing.processor import tokenize_fragment
from sensorium.types.errors import RequestError

_SHORT_CHARACTERS = 2**16  # tokenised whole in a tenth of a second, whatever the context is
_LIKELY_CHARACTERS = 8  # for each token of the context: below, most texts fit and few cost much
_MIN_LONGEST_TOKEN = 128
_PIECE_CHARACTERS = 2**14
_TOKENS_AT_CUTS = 128


class TextLength:
    """The two bounds for texts of one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def check(self, text: str, max_tokens: int) -> None:
        """Raise a `RequestError` if the text has more than `max_tokens` tokens for certain."""
        if len(text) <= max(_SHORT_CHARACTERS, _LIKELY_CHARACTERS * max_tokens):
            return
        check_unicode(text)
        most = self._longest_token * max_tokens
        if len(text) > most:
            raise RequestError(
                f"the prompt has {len(text)} characters, but the {max_tokens} tokens that it may "
                f"have can't stand for more than {most}",
                path=("prompt",),
            )
        self._check_pieces(text, max_tokens)

    @cached_property
    def _longest_token(self) -> int:
        """Length of the longest token, in characters as the vocabulary writes them.

        Vocabularies of bytes write one character for each byte, and no character of a text has
        less than one byte: the length is never too small. Found when the first long text comes,
        because a vocabulary takes a tenth of a second to read.
        """
        lengths = map(len, self._tokenizer.get_vocab())
        return max(_MIN_LONGEST_TOKEN, max(lengths, default=0))

    def _check_pieces(self, text: str, max_tokens: int) -> None:
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            end = start + _PIECE_CHARACTERS
            found = len(tokenize_fragment(self._tokenizer, text[start:end]))
            num_tokens += max(0, found - _TOKENS_AT_CUTS)
            if num_tokens > max_tokens:
                raise RequestError(
                    f"the prompt has {len(text)} characters, and the first "
                    f"{min(end, len(text))} of them are more than the {max_tokens} tokens that "
                    "it may have",
                    path=("prompt",),
                )


def check_unicode(text: str) -> None:
    """Raise a `RequestError` if the text has halves of characters, which have no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not valid Unicode: {error.reason}", path=("prompt",)
        ) from error
