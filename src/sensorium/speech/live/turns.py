"""Divides streaming audio into turns, which are transcribed one by one.

With turn detection a turn begins when a voice is detected, and ends when it has been silent for
some time. Without turn detection the caller ends each turn. Nothing here waits or reads a clock:
time is counted in samples from the start of the session.

Invariants:
  1. Turns do not overlap, and follow each other in time.
  2. With turn detection, the buffer holds the turn that has begun, or else the padding that the
     next turn may begin with. A turn is never longer than `MAX_TURN_S`.
  3. Without turn detection, the buffer holds at most `MAX_BUFFER_S` seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sensorium.speech.live.audio import RATE
from sensorium.speech.live.session import TurnDetection
from sensorium.speech.live.voices import FRAME, SileroDetector, VoiceDetector
from sensorium.types.errors import RequestError
from sensorium.utils.silences import Samples

MAX_TURN_S = 30.0  # the window of most speech models; a longer one would only be shown later
MAX_BUFFER_S = 300.0
MIN_COMMIT_S = 0.1  # as in OpenAI's API
EMPTY_CODE = "input_audio_buffer_commit_empty"
FULL_CODE = "input_audio_buffer_full"
_HYSTERESIS = 0.15  # below the threshold, a voice that was there still counts; Silero's own value
_LEAST = 0.01  # a voice that is less likely is never there, whatever the threshold is
_SAMPLE_BYTES = 4
_SEARCHED = 1 / 3  # the last part of a turn that is too long, in which it is cut


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """The start of a turn, at a sample of the session."""

    start: int


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn [start, end) of the session, with its samples."""

    start: int
    end: int
    samples: Samples


TurnEvent = TurnStarted | TurnEnded


class AudioBufferError(RequestError):
    """The error of a buffer that can't be committed or is full; `code` is OpenAI's, if any."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class TurnBuffer:
    """The uncommitted audio of a session, in which turns are detected."""

    def __init__(
        self,
        detection: TurnDetection | None,
        *,
        make_detector: Callable[[], VoiceDetector] = SileroDetector,
    ) -> None:
        self._make_detector = make_detector
        self._bytes = bytearray()  # of samples; what is deleted at its start costs no copy
        self._first = 0  # the place of the buffer's first sample in the session
        self.configure(detection)

    def configure(self, detection: TurnDetection | None) -> None:
        """Change the turn detection (`None`: off), and drop the uncommitted audio."""
        self._detection = detection
        self.clear()

    @property
    def is_detecting(self) -> bool:
        return self._detection is not None

    @property
    def end(self) -> int:
        """Return the number of samples that the session had so far."""
        return self._first + self.num_samples

    @property
    def num_samples(self) -> int:
        return len(self._bytes) // _SAMPLE_BYTES

    def clear(self) -> None:
        """Drop the uncommitted audio, and start a new detector."""
        self._drop_before(self.end)
        self._looked = self.end  # the detector has seen all before this sample
        self._detector = None if self._detection is None else self._make_detector()
        self._start: int | None = None  # of the turn that has begun
        self._silent_from: int | None = None  # where the voice of that turn became silent
        self._likely: list[float] = []  # the likelihoods of the frames since its start

    def add(self, samples: Samples) -> list[TurnEvent]:
        """Add samples, and return the turns that begin and end with them.

        Raise an `AudioBufferError`, and add nothing, if there is no room without turn detection.
        """
        if self._detector is None and self.num_samples + len(samples) > MAX_BUFFER_S * RATE:
            raise AudioBufferError(
                f"The buffer is full: it holds {MAX_BUFFER_S:g} seconds of audio that was not "
                "committed. Commit or clear it.",
                FULL_CODE,
            )
        self._bytes += samples.astype(np.float32).tobytes()
        if self._detector is None:
            return []
        num_frames = (self.end - self._looked) // FRAME
        frames = self._get(self._looked, self._looked + num_frames * FRAME)
        events: list[TurnEvent] = []
        for likely in self._detector.detect(frames.reshape(num_frames, FRAME)):
            self._looked += FRAME
            events += self._follow(likely)
        if self._start is None:
            self._drop_before(self._looked - self._count("prefix_padding_ms"))
        return events

    def skip(self, num_samples: int) -> None:
        """Count samples of the session that are not kept here. The buffer must be empty."""
        self._first += num_samples
        self._looked = self.end

    def take(self, *, is_last: bool = False) -> Samples:
        """Remove and return the audio of the turn so far. Its `TurnEnded` will have only the rest.

        That rest may be of any length. Without `is_last`, audio that the detector has not seen yet
        is held back. With `is_last`, the turn ends.
        """
        if self._start is None:
            return np.zeros(0, np.float32)
        end = self.end if is_last else self._looked
        samples = self._get(self._start, end)
        self._drop_before(end)
        self._start, self._likely = end, []
        if is_last:
            self.clear()
        return samples

    def commit(self) -> TurnEnded:
        """End the turn now, and return it. Raise an `AudioBufferError` if there is none."""
        start = self._first if self._detector is None else self._start
        if start is None:
            raise AudioBufferError("There is no speech in the buffer to commit.", EMPTY_CODE)
        if self.end - start < MIN_COMMIT_S * RATE:
            raise AudioBufferError(
                f"The buffer has {1000 * (self.end - start) // RATE} ms of audio, but a commit "
                f"needs at least {1000 * MIN_COMMIT_S:g} ms.",
                EMPTY_CODE,
            )
        turn = self._cut(start, self.end)
        self.clear()
        return turn

    def _follow(self, likely: float) -> Sequence[TurnEvent]:
        """Return the events of the frame up to `_looked`; `likely` is its likelihood of a voice."""
        detection = self._detection
        if detection is None:
            return ()
        if self._start is None:
            if likely < detection.threshold:
                return ()
            padded = self._looked - FRAME - self._count("prefix_padding_ms")
            self._start = max(padded, self._first)
            self._likely = [likely]
            return (TurnStarted(self._start),)
        self._likely.append(likely)
        if likely >= detection.threshold:
            self._silent_from = None
        elif likely < self._get_silence() and self._silent_from is None:
            self._silent_from = self._looked - FRAME
        has_ended = (
            self._silent_from is not None
            and self._looked - self._silent_from >= self._count("silence_duration_ms")
        )
        if has_ended:
            turn = self._cut(self._start, self._looked)
            self._start, self._silent_from, self._likely = None, None, []
            return (turn,)
        if self._looked + FRAME - self._start > MAX_TURN_S * RATE:
            return self._cut_long(self._start)
        return ()

    def _get_silence(self) -> float:
        """Return the likelihood below which a voice that has begun counts as silent."""
        threshold = 0.0 if self._detection is None else self._detection.threshold
        return max(threshold - _HYSTERESIS, min(threshold, _LEAST))

    def _cut_long(self, start: int) -> Sequence[TurnEvent]:
        """Cut a turn that is too long where a voice is least likely in its last third."""
        num_searched = max(1, int(len(self._likely) * _SEARCHED))
        least = int(np.argmin(self._likely[-num_searched:]))
        num_later = num_searched - 1 - least  # frames after the cut
        middle = self._looked - num_later * FRAME
        turn = self._cut(start, middle)
        self._start = middle
        self._likely = self._likely[len(self._likely) - num_later :]
        if self._silent_from is not None:
            self._silent_from = max(self._silent_from, middle)
        return (turn, TurnStarted(middle))

    def _cut(self, start: int, end: int) -> TurnEnded:
        """Take a turn out of the buffer, and drop all audio before it."""
        turn = self._get(start, end)
        self._drop_before(end)
        return TurnEnded(start, end, turn)

    def _get(self, start: int, end: int) -> Samples:
        start, end = start - self._first, end - self._first
        return np.frombuffer(
            bytes(self._bytes[start * _SAMPLE_BYTES : end * _SAMPLE_BYTES]), np.float32
        )

    def _drop_before(self, place: int) -> None:
        num_dropped = max(0, place - self._first)
        del self._bytes[: num_dropped * _SAMPLE_BYTES]
        self._first += num_dropped

    def _count(self, name: str) -> int:
        return int(getattr(self._detection, name) * RATE // 1000)
