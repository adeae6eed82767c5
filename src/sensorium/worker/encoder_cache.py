"""Encoder outputs by key. When to keep and when to drop them is the core's business."""

from __future__ import annotations

import torch


class EncoderCache:
    """Every entry owns its memory: a view would keep the whole batch alive that it was cut from."""

    def __init__(self) -> None:
        self._embeds: dict[str, torch.Tensor] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._embeds[key]

    def __contains__(self, key: str) -> bool:
        return key in self._embeds

    def __len__(self) -> int:
        return len(self._embeds)

    def add(self, key: str, embeds: torch.Tensor) -> None:
        """[num_embeds, width]"""
        num_bytes = embeds.numel() * embeds.element_size()
        is_whole = embeds.is_contiguous() and embeds.untyped_storage().nbytes() == num_bytes
        self._embeds[key] = (
            embeds if is_whole else embeds.clone(memory_format=torch.contiguous_format)
        )

    def drop(self, key: str) -> None:
        """Keys that were never added are fine: their encoding failed."""
        self._embeds.pop(key, None)

    @property
    def num_bytes(self) -> int:
        return sum(embeds.untyped_storage().nbytes() for embeds in self._embeds.values())
