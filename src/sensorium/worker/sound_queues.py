"""Keeps the sounds that requests hear while they go on, and encodes what is new of them.

Features are dropped as soon as they are encoded, and embeddings as soon as a step has used them. So
what is kept of a sound that goes on does not grow with its length.
"""

from __future__ import annotations

from collections import deque

import torch

from sensorium.models.streaming import SoundMemory, StreamingAdapter
from sensorium.types.errors import RequestError

# The most positions that are encoded at once. A whole file would need much memory otherwise.
_MAX_POSITIONS = 64


class SoundQueue:
    """The part of one sound that its request has not used yet."""

    def __init__(self) -> None:
        self._features: deque[torch.Tensor] = deque()  # [bins, frames] each, not encoded yet
        self._embeds: torch.Tensor | None = None  # encoded, the first one for position `_start`
        self._start = 0
        self._memory: SoundMemory | None = None

    def append(self, features: torch.Tensor) -> None:
        """Add features of the sound; they are for a whole number of positions."""
        self._features.append(features)

    def encode(self, adapter: StreamingAdapter, end: int) -> None:
        """Encode features until all positions before `end` have their embeddings.

        Raise a `RequestError` if that is not possible.
        """
        while self._features and self._get_end() < end:
            if self._memory is None:
                self._memory = adapter.start_sound()
            features = self._take_features(_MAX_POSITIONS * adapter.frames_per_token)
            embeds = adapter.hear(self._memory, features)
            if not bool(torch.isfinite(embeds).all()):
                raise RequestError("the sound could not be encoded: its embeddings are not finite")
            self._embeds = embeds if self._embeds is None else torch.cat((self._embeds, embeds))

    def _get_end(self) -> int:
        return self._start + (0 if self._embeds is None else len(self._embeds))

    def _take_features(self, most: int) -> torch.Tensor:
        """Remove the next features from the queue, at most so many frames, and return them."""
        parts: list[torch.Tensor] = []
        while self._features and most > 0:
            part = self._features.popleft()
            if part.shape[-1] > most:
                self._features.appendleft(part[:, most:])
                part = part[:, :most]
            parts.append(part)
            most -= part.shape[-1]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

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
