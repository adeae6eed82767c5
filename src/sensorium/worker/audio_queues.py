"""Keeps the streaming audio of requests, and encodes its new parts.

Features are dropped as soon as they are encoded, and embeddings as soon as a step has used them. So
the memory for an audio stream does not grow with its length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence

import torch

from sensorium.models.streaming import AudioMemory, StreamingModel
from sensorium.types.errors import RequestError

# The most positions that are encoded at once. A whole file would need much memory otherwise.
_MAX_POSITIONS = 64


class AudioQueue:
    """The part of one request's audio that no step has used yet."""

    def __init__(self) -> None:
        self.memory = AudioMemory()
        self._features: deque[torch.Tensor] = deque()  # [bins, frames] each, not encoded yet
        self._embeds: torch.Tensor | None = None  # encoded, the first one for position `_start`
        self._start = 0

    def append(self, features: torch.Tensor) -> None:
        """Add features of the audio, for a whole number of positions."""
        self._features.append(features)

    def lacks(self, end: int) -> bool:
        """Return whether features have to be encoded for the positions before `end`."""
        num_embeds = 0 if self._embeds is None else len(self._embeds)
        return bool(self._features) and self._start + num_embeds < end

    def take_features(self, most: int) -> torch.Tensor:
        """Remove and return the next features, at most `most` frames."""
        parts: list[torch.Tensor] = []
        while self._features and most > 0:
            part = self._features.popleft()
            if part.shape[-1] > most:
                self._features.appendleft(part[:, most:])
                part = part[:, :most]
            parts.append(part)
            most -= part.shape[-1]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def add_embeds(self, embeds: torch.Tensor) -> None:
        self._embeds = embeds if self._embeds is None else torch.cat((self._embeds, embeds))

    def take(self, start: int, end: int) -> torch.Tensor:
        """Return the embeddings of the positions [start, end), and drop those before `start`."""
        if self._embeds is None:
            raise RequestError("the audio has not arrived yet")
        self._embeds = self._embeds[start - self._start :]
        self._start = start
        return self._embeds[: end - start]

    def renumber(self, count: int) -> None:
        """Let the position `count` become position 0."""
        self._start -= count


def encode_audios(
    hf_model: StreamingModel, wanted: Mapping[str, tuple[AudioQueue, int]]
) -> dict[str, RequestError]:
    """Encode the audio of requests up to the position that each of them needs in a step.

    `wanted` has the queue and the exclusive end of the positions, by request id. Parts with equally
    many frames, and with encoder states of equal length, are encoded together. Return the errors by
    request id: only requests with audio that can't be encoded fail.
    """
    failed: dict[str, RequestError] = {}
    while True:
        batches: dict[Hashable, list[tuple[str, AudioQueue, torch.Tensor]]] = {}
        for request_id, (queue, end) in wanted.items():
            if request_id not in failed and queue.lacks(end):
                features = queue.take_features(_MAX_POSITIONS * hf_model.frames_per_token)
                key = features.shape, queue.memory.num_kept
                batches.setdefault(key, []).append((request_id, queue, features))
        if not batches:
            return failed
        for batch in batches.values():
            failed |= _encode_batch(hf_model, batch)


def _encode_batch(
    hf_model: StreamingModel, batch: Sequence[tuple[str, AudioQueue, torch.Tensor]]
) -> dict[str, RequestError]:
    """Encode a batch of audio, or each part alone if that fails; return errors by request id."""
    try:
        memories = [queue.memory for _, queue, _ in batch]
        embeds = hf_model.encode_parts(memories, [features for *_, features in batch])
        verdicts = torch.stack([torch.isfinite(each).all() for each in embeds]).tolist()
    except Exception as error:  # models raise all kinds of errors; only the audio at fault fails
        if len(batch) > 1:
            results = [_encode_batch(hf_model, [entry]) for entry in batch]
            return {name: reason for result in results for name, reason in result.items()}
        reason = f"the audio could not be encoded: {type(error).__name__}: {error}"
        return {batch[0][0]: RequestError(reason)}
    failed: dict[str, RequestError] = {}
    for (request_id, queue, _), each, is_finite in zip(batch, embeds, verdicts, strict=True):
        if is_finite:
            queue.add_embeds(each)
        else:
            reason = "the audio could not be encoded: its embeddings are not finite"
            failed[request_id] = RequestError(reason)
    return failed
