"""The caller's side of a request for streaming audio: it adds samples and reads the text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol

from sensorium.multimodal.processing.streaming_audio import AudioStream
from sensorium.types.outputs import RequestDelta

if TYPE_CHECKING:
    import torch

    from sensorium.multimodal.processing.audio import Samples


class SendFeatures(Protocol):
    """A function that sends features to the core; `None` if only the end of the audio is sent."""

    def __call__(self, features: torch.Tensor | None, is_last: bool) -> None: ...


class AudioRequest:
    """A request that takes audio part by part, and returns text meanwhile, on one event loop."""

    def __init__(
        self,
        stream: AudioStream,
        *,
        send: SendFeatures,
        deltas: AsyncIterator[RequestDelta],
        abort: Callable[[], None],
    ) -> None:
        self._stream = stream
        self.send = send  # also sends features that were computed elsewhere
        self._abort = abort
        self._is_ended = False
        self.deltas = deltas  # of the text; the last one has `final` set

    def append(self, samples: Samples) -> int:
        """Add samples, send the new features, and return how many positions these take."""
        features = self._stream.append(samples)
        if features is None:
            return 0
        self.send(features, is_last=False)
        return self._stream.count_positions(features)

    def end(self) -> int:
        """End the audio, and return how many positions its last features take. Text follows."""
        if self._is_ended:
            return 0
        self._is_ended = True
        features = self._stream.close()
        self.send(features, is_last=True)
        return 0 if features is None else self._stream.count_positions(features)

    def close(self) -> None:
        """Forget the request, and abort it if it has not ended."""
        self._abort()
