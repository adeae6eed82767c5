"""The tokenizer of Whisper's English-only models, made of OpenAI's vocabulary.

The vocabulary lists the bytes of each token in the order in which byte pair encoding learned them.
Transformers needs the pair that each token was merged from, which follows from that order. Behind
the text stand OpenAI's special tokens, and behind these the times from 0 to 30 seconds.
"""

from __future__ import annotations

import base64
from itertools import pairwise
from pathlib import Path
from typing import Any

END, START = "<|endoftext|>", "<|startoftranscript|>"
PREVIOUS, WITHOUT_TIMES = "<|startofprev|>", "<|notimestamps|>"
_NUM_LANGUAGES = 99
# The order is OpenAI's. Transformers reads it as well: times begin behind the last of these.
_TASKS = ("<|translate|>", "<|transcribe|>", "<|startoflm|>", PREVIOUS, "<|nospeech|>")
_NUM_TIMES, _SECONDS_PER_TIME = 1501, 0.02
# What subtitles have and speech has not. OpenAI's rule suppresses each where it is one token, alone
# or behind a space.
_SIGNS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~',
    *"「」『』",
    *("<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))"),
    *("[[", "]]", "{{", "}}", "♪♪", "♪♪♪"),
)
# The first token of each is suppressed, also where there are more: only such signs begin with it.
_NOTES = "♩♪♫♬♭♮♯"
# These may stand inside a word, not before it.
_INNER_SIGNS = ("-", "'")


def read_vocabulary(path: Path) -> list[bytes]:
    """Return the bytes of each token, by its number."""
    return [base64.b64decode(line.split()[0]) for line in path.read_bytes().splitlines()]


def make_tokenizer(vocabulary: list[bytes]) -> Any:
    from transformers import WhisperTokenizer
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    letters = get_letters()
    spelled = ["".join(letters[byte] for byte in token) for token in vocabulary]
    languages = [f"<|{code}|>" for code in list(LANGUAGES)[:_NUM_LANGUAGES]]
    tokenizer = WhisperTokenizer(
        vocab={token: i for i, token in enumerate([*spelled, END])},
        merges=[(spelled[a], spelled[b]) for a, b in find_merges(vocabulary)],
        pad_token=END,
        extra_special_tokens=[START, *languages, *_TASKS, WITHOUT_TIMES],
        model_max_length=1024,
    )
    _add_times(tokenizer)
    return tokenizer


def _add_times(tokenizer: Any) -> None:
    """Add the times, which are not special tokens: Transformers removes them by their looks."""
    from tokenizers import AddedToken

    names = [f"<|{i * _SECONDS_PER_TIME:.2f}|>" for i in range(_NUM_TIMES)]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])


def find_merges(vocabulary: list[bytes]) -> list[tuple[int, int]]:
    """Return the two tokens that each token longer than a byte was merged from, in their order.

    They are what is left of its bytes when all earlier merges have been applied to them.
    """
    ranks = {token: rank for rank, token in enumerate(vocabulary)}
    merges = []
    for rank, token in enumerate(vocabulary):
        if len(token) > 1:
            first, second = _merge(token, ranks, rank)
            merges.append((ranks[first], ranks[second]))
    return merges


def _merge(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """Split a token into bytes and merge them, using only tokens below the limit."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        pairs = [ranks.get(a + b, limit) for a, b in pairwise(parts)]
        lowest = min(pairs)
        if lowest >= limit:
            break
        i = pairs.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def get_letters() -> list[str]:
    """Return the letter by which GPT-2's tokenizers write each byte.

    It is the byte's own in Latin-1 where that can be seen, else the next one from U+0100 on.
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(0x100)]


def find_suppressed(tokenizer: Any) -> list[int]:
    """Return the tokens that OpenAI never lets a transcript have: signs, and special tokens."""
    found = {tokenizer.convert_tokens_to_ids(token) for token in (START, *_TASKS)}
    for sign in (*_SIGNS, *_NOTES):
        for text in (sign, f" {sign}"):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if len(tokens) == 1 or sign in _NOTES:
                found.add(tokens[0])
    for sign in _INNER_SIGNS:
        found.add(tokenizer.encode(f" {sign}", add_special_tokens=False)[0])
    return sorted(found)
