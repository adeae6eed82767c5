"""The model's own tokenizer: whole words where the model speaks, letters where it reads.

A word after a space or with a capital first letter may become one token. A lower-case word at the
start of a line, words in capitals and digits are spelled, so that reading a text is spelling it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.architecture import SPECIAL_NAMES, SPECIAL_TOKENS

MAX_TOKENS = 4096
_PIECES = Regex(
    r" [A-Za-z][a-z']+|[A-Z][a-z']+| ?\p{L}|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\S)|\s+",
)


def train_tokenizer(texts: Iterable[str]) -> Any:
    import transformers as tf

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_TOKENS,
        min_frequency=20,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=SPECIAL_NAMES,
    )


def load_tokenizer(directory: Path) -> Any:
    import transformers as tf

    return tf.AutoTokenizer.from_pretrained(directory)


class FastEncoder:
    """Texts to token numbers, remembering those that it has seen."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        tokens = self._known.get(text)
        if tokens is None:
            tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._known) < 200_000:
                self._known[text] = tokens
        return tokens
