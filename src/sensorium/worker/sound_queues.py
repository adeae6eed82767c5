"""Keeps the sounds that requests hear while they go on, and encodes what is new of them.

Features are dropped as soon as they are encoded, and embeddings as soon as a step has used them. So
what is kept of a sound does not grow with its length.
"""

from __future__ import annotations

import torch

from sensorium.models.streaming import SoundMemory, StreamingAdapter
from sensorium.types.errors import RequestError


class SoundQueue:
    """The part of one sound that its request has not used yet."""

    def __init__(self) -> None:
        self._features: list[torch.Tensor] = []  # [bins, frames] each, not encoded yet
        self._embeds: torch.Tensor | None = None  # encoded, the first one for position `_start`
        self._start = 0
        self._memory: SoundMemory | None = None

    def append(self, features: torch.Tensor) -> None:
        """Add features of the sound; they are for a whole number of positions."""
        self._features.append(features)

    def encode(self, adapter: StreamingAdapter) -> None:
        """Encode all features that were added. Raise a `RequestError` if that is not possible."""
        if not self._features:
            return
        if self._memory is None:
            self._memory = adapter.start_sound()
        features, self._features = torch.cat(self._features, dim=-1), []
        embeds = adapter.hear(self._memory, features)
        if not bool(torch.isfinite(embeds).all()):
            raise RequestError("the sound could not be encoded: its embeddings are not finite")
        self._embeds = embeds if self._embeds is None else torch.cat((self._embeds, embeds))

    def take(self, start: int, end: int) -> torch.Tensor:
        """Return the embeddings of the positions [start, end), and forget those before `start`."""
        if self._embeds is None:
            raise RequestError("the sound has not come yet")
        self._embeds = self._embeds[start - self._start :]
        self._start = start
        return self._embeds[: end - start]

    def renumber(self, count: int) -> None:
        """Let positions count from `count` on as from 0."""
        self._start -= count
