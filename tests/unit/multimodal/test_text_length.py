"""No text is refused that would fit, and none is tokenised whole that can't."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sensorium.multimodal import placeholders
from sensorium.multimodal.placeholders import TextLength
from sensorium.types.errors import RequestError


def make_tokenizer(kind: str) -> Any:
    """Return a tokenizer that keeps all characters, or one of those that drop or join many."""
    letters = {chr(code): code for code in range(256, 1024)}
    if kind == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        spaces = ["Ġ" * 2**power for power in range(1, 9)]
        merges = [("Ġ" * 2**power, "Ġ" * 2**power) for power in range(8)]
        vocabulary = {token: index for index, token in enumerate([*alphabet, *spaces])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    elif kind == "words":
        tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        vocabulary = {"<unk>": 0, "a": 1, "aa": 2, **letters}
        tokenizer = Tokenizer(
            models.BPE(vocab=vocabulary, merges=[("a", "a")], unk_token="<unk>", fuse_unk=True)
        )
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {kind: make_tokenizer(kind) for kind in ("bytes", "words", "unknown")}


class CountingTokenizer:
    """Counts the characters that a tokenizer was given."""

    is_fast = True

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_characters = 0

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._inner.get_vocab()
        return vocabulary

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_characters += len(text)
        return self._inner(text, **options)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(TOKENIZERS)),
    runs=st.lists(
        st.tuples(
            st.sampled_from(
                ["a", " ", "\n", "é", "e\u0301", "中", "😀", "z", "ab ", "a" * 99 + " "]
            ),
            st.integers(1, 3000),
        ),
        max_size=6,
    ),
    context=st.integers(1, 3000),
)
def test_a_text_that_fits_is_never_refused(
    kind: str, runs: list[tuple[str, int]], context: int
) -> None:
    text = "".join(piece * count for piece, count in runs)
    tokenizer = TOKENIZERS[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placeholders, "_SHORT_CHARACTERS", 64)
        patch.setattr(placeholders, "_LIKELY_CHARACTERS", 0)
        patch.setattr(placeholders, "_PIECE_CHARACTERS", 512)
        try:
            TextLength(tokenizer).check(text, context)
        except RequestError:
            num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            # Tokenizers that drop nearly all of a text are bounded by its characters alone.
            assert num_tokens > context or len(text) > 128 * context


def test_the_longest_token_of_the_vocabulary_counts() -> None:
    """A token of 256 spaces: 1,000 tokens hold 256,000 characters."""
    check = TextLength(TOKENIZERS["bytes"]).check
    check(" " * 256_000, 1000)
    with pytest.raises(RequestError, match=r"256001 characters.*1000 tokens.*more than 256000"):
        check(" " * 256_001, 1000)


def test_a_text_of_many_characters_is_not_tokenised_at_all() -> None:
    tokenizer = CountingTokenizer(TOKENIZERS["bytes"])
    with pytest.raises(RequestError, match="16777216 characters"):
        TextLength(tokenizer).check("a" * 2**24, 1000)
    assert tokenizer.num_characters == 0


def test_counting_ends_when_the_text_is_too_long() -> None:
    tokenizer = CountingTokenizer(TOKENIZERS["bytes"])
    with pytest.raises(RequestError, match="first 65536 of them are more than the 60000 tokens"):
        TextLength(tokenizer).check("a" * 2**22, 60_000)
    assert tokenizer.num_characters == 65_536


@pytest.mark.parametrize("num_characters", [10, 2**16, 2**20])
def test_half_a_character_is_refused_in_texts_of_any_length(num_characters: int) -> None:
    text = "a" * num_characters + "\ud800"
    if num_characters < 2**16:
        TextLength(TOKENIZERS["bytes"]).check(text, 100_000)  # left to those who tokenise it
    else:
        with pytest.raises(RequestError, match="Unicode"):
            TextLength(TOKENIZERS["bytes"]).check(text, 2**13)
