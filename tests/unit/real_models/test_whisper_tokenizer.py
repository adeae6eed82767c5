"""Merges are found again in a vocabulary that has only their order. No network, small models."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from real_models.whisper_tokenizer import (
    END,
    find_merges,
    get_letters,
    make_tokenizer,
    read_vocabulary,
)

TEXT = "the other mother gathers the feathers there — then bathes them, naïve «thé» 그리고 ♪"


def train() -> tuple[list[str], list[tuple[str, str]]]:
    """Train a small byte-level tokenizer; return its tokens and its merges, in their order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [(first, second) for first, second in model["merges"]]


def get_bytes(token: str) -> bytes:
    letters = get_letters()
    return bytes(letters.index(letter) for letter in token)


def test_each_byte_has_a_letter_of_its_own() -> None:
    letters = get_letters()
    assert len(letters) == len({*letters}) == 256
    assert {*letters} == {*pre_tokenizers.ByteLevel.alphabet()}
    assert letters[ord("a")] == "a"
    assert letters[ord(" ")] == "Ġ"


def test_merges_follow_from_the_order_of_the_tokens() -> None:
    tokens, merges = train()
    assert len(merges) > 40
    found = find_merges([get_bytes(token) for token in tokens])
    assert [(tokens[first], tokens[second]) for first, second in found] == merges


def test_special_tokens_and_times_stand_behind_the_text(tmp_path: Path) -> None:
    tokens, _ = train()
    path = tmp_path / "any.tiktoken"
    lines = [base64.b64encode(get_bytes(token)) + b" %d" % i for i, token in enumerate(tokens)]
    path.write_bytes(b"\n".join(lines))
    tokenizer = make_tokenizer(read_vocabulary(path))
    assert tokenizer.convert_tokens_to_ids(END) == len(tokens)
    assert len(tokenizer) == len(tokens) + 107 + 1501
    assert tokenizer.convert_tokens_to_ids("<|0.00|>") == tokenizer.all_special_ids[-1] + 1
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(ids) < len(TEXT)
    assert tokenizer.decode(ids) == TEXT
