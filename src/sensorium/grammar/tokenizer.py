"""Converts a model's tokenizer into one of llguidance, which has the bytes of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from sensorium.types.errors import RequestError

WORD_BITS = 64  # masks are made of whole words


def make_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the llguidance form of a fast tokenizer of Transformers, or of a mistral-common one.

    Masks get a bit for each of the model's `vocab_size` logits, or for each token if there are more
    tokens than logits. llguidance needs a token that ends an answer: without `eos_token_ids`, one
    of the special tokens is used. Raise `RequestError` for any other kind of tokenizer.
    """
    try:
        if getattr(tokenizer, "is_fast", False):
            return _make_fast(tokenizer, vocab_size, eos_token_ids)
        if type(tokenizer).__name__ == "MistralCommonBackend":
            return _make_mistral(tokenizer, vocab_size, eos_token_ids)
        raise ValueError("it is neither a fast tokenizer of Transformers nor Mistral's")
    except ValueError as error:
        raise RequestError(
            f"can't be used with this model's tokenizer: {error}", path=("structured_outputs",)
        ) from error


def _make_fast(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    num_tokens = max(tokenizer.get_vocab().values()) + 1
    # Padding and truncation are turned off in a copy, because other users of the tokenizer may need
    # them.
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return LLTokenizer(
        backend.to_str(),
        n_vocab=_round_up(max(vocab_size, num_tokens)),
        eos_token=_get_end(tokenizer, eos_token_ids, num_tokens),
    )


def _make_mistral(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    inner = tokenizer.tokenizer.instruct_tokenizer.tokenizer
    num_tokens = int(inner.n_words)
    num_bits = _round_up(max(vocab_size, num_tokens))
    return LLTokenizer(
        TokenizerWrapper(_MistralTokens(inner, num_bits)),
        eos_token=_get_end(tokenizer, eos_token_ids, num_tokens),
    )


class _MistralTokens:
    """A mistral-common tokenizer with the interface that `TokenizerWrapper` needs."""

    def __init__(self, inner: Any, num_bits: int) -> None:
        ids = range(int(inner.n_words))
        self.eos_token_id = int(inner.eos_id)
        self.bos_token_id = int(inner.bos_id)
        self.special_token_ids = [token_id for token_id in ids if inner.is_special(token_id)]
        special = set(self.special_token_ids)
        # The wrapper takes the size of the vocabulary from the length of this list: it is padded.
        self.tokens = [
            inner.id_to_piece(i).encode() if i in special else inner.id_to_byte_piece(i)
            for i in ids
        ] + [b""] * (num_bits - len(ids))
        self._inner = inner

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self._inner.encode(text.decode(), bos=False, eos=False)
        return ids


def _get_end(tokenizer: Any, eos_token_ids: Sequence[int], num_tokens: int) -> list[int]:
    given = [token_id for token_id in eos_token_ids if token_id < num_tokens]
    others = (tokenizer.eos_token_id, tokenizer.pad_token_id, *tokenizer.all_special_ids)
    end = given or [token_id for token_id in others if token_id is not None][:1]
    if not end:
        raise ValueError("it has no special token that could end an answer")
    return end


def _round_up(num_tokens: int) -> int:
    return -(-num_tokens // WORD_BITS) * WORD_BITS
