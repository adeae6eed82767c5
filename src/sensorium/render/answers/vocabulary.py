"""Finds the special tokens of a tokenizer of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer's special tokens, and the version if it is one of Mistral's own tokenizers."""

    special_tokens: Mapping[str, int] = field(default_factory=dict)  # text -> id
    mistral_version: int = 0  # 0: it is none of Mistral's own tokenizers
    tokenizer: Any = None

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        if type(tokenizer).__name__ == "MistralCommonBackend":
            return cls(
                special_tokens=_get_mistral_tokens(tokenizer),
                mistral_version=_get_mistral_version(tokenizer),
                tokenizer=tokenizer,
            )
        added = tokenizer.added_tokens_decoder.items()
        special = {token.content: token_id for token_id, token in added if token.special}
        return cls(special_tokens=special, tokenizer=tokenizer)

    @property
    def is_mistral(self) -> bool:
        return self.mistral_version > 0

    def __contains__(self, text: str) -> bool:
        return text in self.special_tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(list(token_ids))
        return text


def _get_mistral_tokens(tokenizer: Any) -> dict[str, int]:
    ids = tokenizer.all_special_ids
    return dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True))


def _get_mistral_version(tokenizer: Any) -> int:
    """Return the number in a version's name: they are called v1, v7, v11 and so on."""
    digits = "".join(filter(str.isdecimal, str(tokenizer.tokenizer.version.value)))
    return int(digits or 1)
