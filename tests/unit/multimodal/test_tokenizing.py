"""Texts are tokenised in pieces, as Mistral's tokenizer has no control tokens and no offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoProcessor

from sensorium.multimodal.processing.processor import tokenize, tokenize_fragment

TEXT = "<s>[INST][BEGIN_AUDIO][AUDIO][AUDIO]what is  said?[/INST]"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], str]) -> Any:
    return AutoProcessor.from_pretrained(tiny_model("voxtral")).tokenizer


def test_control_tokens_are_found_among_text(tokenizer: Any) -> None:
    token_ids, find_token = tokenize(tokenizer, TEXT)
    words = tokenizer.encode("what is  said?", add_special_tokens=False)
    assert token_ids == [1, 3, 25, 24, 24, *words, 4]
    assert find_token(TEXT.index("[BEGIN_AUDIO]")) == 2
    assert find_token(TEXT.index("[AUDIO]")) == 3
    assert find_token(TEXT.index("what") - 1) == 4
    assert find_token(TEXT.index("[/INST]")) == len(token_ids) - 1


def test_a_missing_start_token_is_added(tokenizer: Any) -> None:
    token_ids, find_token = tokenize(tokenizer, TEXT.removeprefix("<s>"))
    assert token_ids == tokenize(tokenizer, TEXT)[0]
    assert find_token(0) == 1
    assert tokenize(tokenizer, "")[0] == [1]


def test_a_fragment_gets_nothing_added(tokenizer: Any) -> None:
    assert tokenize_fragment(tokenizer, "[AUDIO]" * 3) == [24] * 3
    assert tokenize_fragment(tokenizer, "") == []
