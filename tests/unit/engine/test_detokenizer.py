"""Text comes out token by token, never to be taken back, and adds up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sensorium.engine.outputs.text_reader import NUM_PROMPT_TOKENS, Detokenizer, find_stop

NUM_BYTE_TOKENS = 259  # three special tokens, then one for each byte
quick = settings(deadline=None, max_examples=150)
texts = st.text(alphabet=st.sampled_from("abé ñ日本🙂👩\u200d🚀\ufffd\n<|"), max_size=12)
token_lists = st.lists(st.integers(0, NUM_BYTE_TOKENS - 1), max_size=30)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], str]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    assert len(tokenizer) > NUM_BYTE_TOKENS
    return tokenizer


def feed(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    """Return the text after each token, and after the end."""
    pieces = [detokenizer.add(token_id) for token_id in token_ids]
    return list(accumulate([*pieces, detokenizer.finish()]))


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


@given(token_ids=token_lists)
@quick
def test_any_tokens_add_up_to_what_the_tokenizer_decodes(
    tokenizer: Any, token_ids: list[int]
) -> None:
    """Most of these sequences are no valid UTF-8, and some hold special tokens."""
    seen = feed(Detokenizer(tokenizer), token_ids)
    assert seen[-1] == decode(tokenizer, token_ids)
    for earlier, later in pairwise(seen):
        assert later.startswith(earlier)


@given(cuts=st.lists(st.tuples(texts, st.integers(0, 3), st.integers(0, 3)), max_size=5))
@quick
def test_characters_that_were_cut_anywhere_add_up_as_well(
    tokenizer: Any, cuts: list[tuple[str, int, int]]
) -> None:
    token_ids = []
    for text, num_first, num_last in cuts:
        part = tokenizer(text)["input_ids"]
        token_ids.extend(part[num_first : len(part) - num_last])
    assert feed(Detokenizer(tokenizer), token_ids)[-1] == decode(tokenizer, token_ids)


@given(prompt=texts, text=texts)
@quick
def test_text_in_many_scripts_follows_its_prompt(tokenizer: Any, prompt: str, text: str) -> None:
    prompt_ids = tokenizer(prompt)["input_ids"]
    token_ids = tokenizer(text)["input_ids"]
    recent = tuple(prompt_ids[-NUM_PROMPT_TOKENS:])
    seen = feed(Detokenizer(tokenizer, recent, len(recent)), token_ids)
    assert seen[-1] == decode(tokenizer, token_ids)


class Counting:
    """A tokenizer that counts the tokens which it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def __len__(self) -> int:
        return len(self._tokenizer)

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("silent", [1, 2**31 - 1])
def test_tokens_without_text_cost_the_same_however_many_they_are(
    tokenizer: Any, silent: int
) -> None:
    """Special tokens, and ids outside of the vocabulary."""
    counting = Counting(tokenizer)
    hello, world = (tokenizer(text)["input_ids"] for text in ("a🙂", " b"))
    token_ids = [*hello[:-1], *[silent] * 1000, hello[-1], *[silent] * 1000, *world]
    assert feed(Detokenizer(counting), token_ids)[-1] == "a🙂 b"
    assert counting.num_decoded < 200 * len(token_ids)


def test_a_character_comes_out_with_its_last_byte(tokenizer: Any) -> None:
    token_ids = tokenizer("a🙂b")["input_ids"]
    assert len(token_ids) == 6  # the emoji is four tokens of one byte
    assert feed(Detokenizer(tokenizer), token_ids)[:6] == ["a", "a", "a", "a", "a🙂", "a🙂b"]


def test_an_incomplete_character_comes_out_at_the_end_only(tokenizer: Any) -> None:
    token_ids = tokenizer("a🙂")["input_ids"][:-1]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.add, token_ids)) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_have_no_text(tokenizer: Any) -> None:
    a, b = tokenizer("ab")["input_ids"]
    assert feed(Detokenizer(tokenizer), [a, tokenizer.eos_token_id, b])[-1] == "ab"


def find_stop_slowly(
    text: str, stop: tuple[str, ...], num_new_characters: int
) -> tuple[str, int] | None:
    found = [
        (start + len(candidate), start, candidate)
        for candidate in stop
        for start in range(len(text))
        if text[start : start + len(candidate)] == candidate
        and start + len(candidate) > len(text) - num_new_characters
    ]
    if not found:
        return None
    _, start, candidate = min(found)
    return candidate, start


short = st.text(alphabet="ab", max_size=14)


@given(
    text=short,
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3).map(tuple),
    data=st.data(),
)
@quick
def test_the_stop_string_that_ends_first_in_the_new_text_is_found(
    text: str, stop: tuple[str, ...], data: st.DataObject
) -> None:
    num_new = data.draw(st.integers(0, len(text)))
    found = find_stop(text, stop, num_new_characters=num_new)
    assert found == find_stop_slowly(text, stop, num_new)


@given(parts=st.lists(short, max_size=6), stop=st.text(alphabet="ab", min_size=1, max_size=4))
@quick
def test_a_stop_string_is_found_wherever_the_tokens_part_it(parts: list[str], stop: str) -> None:
    text, place = "", None
    for part in parts:
        text += part
        found = find_stop(text, (stop,), num_new_characters=len(part))
        if found is not None:
            place = found[1]
            break
    whole = "".join(parts).find(stop)
    assert place == (None if whole < 0 else whole)


def test_special_tokens_are_skipped_kept_or_all_there(tokenizer: Any) -> None:
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    token_ids = [start, *tokenizer.encode("é x"), end, *tokenizer.encode("y"), start]
    for options, expected in (
        ({}, "é xy"),
        ({"kept_special_token_ids": (end,)}, "é x<|im_end|>y"),
        ({"skip_special_tokens": False}, "<|im_start|>é x<|im_end|>y<|im_start|>"),
        (
            {"skip_special_tokens": False, "kept_special_token_ids": (end,)},
            "<|im_start|>é x<|im_end|>y<|im_start|>",
        ),
    ):
        assert feed(Detokenizer(tokenizer, **options), token_ids)[-1] == expected


@given(token_ids=token_lists, kept=st.sets(st.integers(0, 2)))
@quick
def test_kept_tokens_add_up_as_well(tokenizer: Any, token_ids: list[int], kept: set[int]) -> None:
    seen = feed(Detokenizer(tokenizer, kept_special_token_ids=tuple(kept)), token_ids)
    left = [token_id for token_id in token_ids if token_id > 2 or token_id in kept]
    assert seen[-1] == tokenizer.decode(left, skip_special_tokens=not kept)
    for earlier, later in pairwise(seen):
        assert later.startswith(earlier)


def test_mistrals_own_tokenizer_also_keeps_tokens(tiny_model: Callable[[str], str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("voxtral"))
    words = tokenizer.encode("the", add_special_tokens=False)
    token_ids = [3, 9, *words, 20, *words, 4]
    seen = feed(Detokenizer(tokenizer, kept_special_token_ids=(9, 20)), token_ids)
    assert seen[-1] == "[TOOL_CALLS]the[ARGS]the"
