"""Holds encoder outputs by key. The core decides when they are kept and when they are dropped."""

from __future__ import annotations

import torch


class EncoderCache:
    """A map from encoder keys to embeddings, in which every entry owns its memory.

    A view would keep alive the whole batch that it was cut from.
    """

    def __init__(self) -> None:
        self._embeds: dict[str, torch.Tensor] = {}  # key -> [num_embeds, width]

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._embeds[key]

    def __contains__(self, key: str) -> bool:
        return key in self._embeds

    def __len__(self) -> int:
        return len(self._embeds)

    def add(self, key: str, embeds: torch.Tensor) -> None:
        """Store embeddings [num_embeds, width]; a view of a larger tensor is copied."""
        num_bytes = embeds.numel() * embeds.element_size()
        is_whole = embeds.is_contiguous() and embeds.untyped_storage().nbytes() == num_bytes
        self._embeds[key] = (
            embeds if is_whole else embeds.clone(memory_format=torch.contiguous_format)
        )

    def drop(self, key: str) -> None:
        """Remove an entry. The key may be missing, because its encoding may have failed."""
        self._embeds.pop(key, None)

    @property
    def num_bytes(self) -> int:
        return sum(embeds.untyped_storage().nbytes() for embeds in self._embeds.values())
