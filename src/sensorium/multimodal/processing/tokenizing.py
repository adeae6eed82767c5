"""Text to token ids, with the way back from characters to tokens."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import Any

# The token that a character belongs to; `None` if the tokenizer dropped it.
FindToken = Callable[[int], int | None]


def tokenize(
    tokenizer: Any, text: str, *, add_special_tokens: bool = True
) -> tuple[list[int], FindToken]:
    if getattr(tokenizer, "is_fast", False):
        # Lists of masks would be made element by element, with the interpreter locked.
        encoding = tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return list(encoding["input_ids"]), encoding.char_to_token
    return _tokenize_in_pieces(tokenizer, text)


def tokenize_fragment(tokenizer: Any, text: str) -> list[int]:
    """Nothing is added in front or behind."""
    if getattr(tokenizer, "is_fast", False):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [token_id for _, ids in _split(tokenizer, text) for token_id in ids]


def _tokenize_in_pieces(tokenizer: Any, text: str) -> tuple[list[int], FindToken]:
    """For tokenizers that read control tokens as plain text and know no offsets (Mistral's).

    Only characters of control tokens can be found.
    """
    token_ids: list[int] = []
    if not text.startswith(tokenizer.bos_token):
        token_ids.append(tokenizer.bos_token_id)
    starts, tokens = [], []
    for start, ids in _split(tokenizer, text):
        starts.append(start)
        tokens.append(len(token_ids))
        token_ids.extend(ids)
    return token_ids, lambda character: tokens[bisect_right(starts, character) - 1]


def _split(tokenizer: Any, text: str) -> list[tuple[int, list[int]]]:
    """The pieces of a text, with their first characters: a control token, or what is between."""
    pattern, id_of = _get_control_tokens(tokenizer)
    pieces = []
    start = 0
    for piece in pattern.split(text):
        if piece in id_of:
            pieces.append((start, [id_of[piece]]))
        elif piece:
            pieces.append((start, list(tokenizer.encode(piece, add_special_tokens=False))))
        start += len(piece)
    return pieces


@lru_cache(maxsize=8)
def _get_control_tokens(tokenizer: Any) -> tuple[re.Pattern[str], dict[str, int]]:
    tokens = tokenizer.all_special_tokens
    id_of = dict(zip(tokens, tokenizer.convert_tokens_to_ids(tokens), strict=True))
    return re.compile(f"({'|'.join(map(re.escape, tokens))})"), id_of
