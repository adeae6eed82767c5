"""Measures live sessions: their number and length, their audio, and how far they are behind."""

from __future__ import annotations

import time
from collections.abc import Callable

from sensorium.server.metrics.clock import RequestClock
from sensorium.server.metrics.metric_set import MetricSet
from sensorium.speech.live.session import Committed, Completed, Failed, LiveEvent, TextDelta
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams

_ACTIVE = "sensorium:realtime_sessions_active"
_WAITING = "sensorium:realtime_waiting_seconds"


class SessionClock:
    """A stopwatch of one live session that writes to the metrics.

    Each item of a session is a request in the metrics of requests, from its commit to its end. An
    item that fails before its commit counts as a request of no length.
    """

    def __init__(self, metrics: MetricSet, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._began = clock()
        self._waiting_s = 0.0
        self.audio_s = 0.0  # that the client has sent
        self.num_items = 0  # that were committed, or have failed
        self.num_failed = 0
        self._requests: dict[str, tuple[float, RequestClock]] = {}  # item -> its commit, its clock
        metrics.gauge(_ACTIVE).inc()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def count_audio(self, seconds: float) -> None:
        self.audio_s += seconds
        self._metrics.counter("sensorium:realtime_audio_seconds_total").inc(seconds)

    def on_chunk(self, seconds: float) -> None:
        """Record how many seconds it took until the session had accepted a chunk of audio."""
        self._observe("sensorium:realtime_chunk_seconds", seconds)

    def set_waiting(self, seconds: float) -> None:
        """Record how many seconds of audio the session holds that are not transcribed yet."""
        self._metrics.gauge(_WAITING).inc(seconds - self._waiting_s)
        self._waiting_s = seconds

    def on_event(self, event: LiveEvent) -> None:
        """Measure an event of the session at the time at which it is sent."""
        now = self._clock()
        if isinstance(event, Committed):
            self._requests[event.item_id] = now, self._start(now)
        elif isinstance(event, TextDelta) and event.item_id in self._requests:
            self._requests[event.item_id][1].on_segment()
        elif isinstance(event, Completed) and event.item_id in self._requests:
            committed, request = self._requests.pop(event.item_id)
            request.on_segment()
            request.on_transcript(event.transcript.usage)
            self._observe("sensorium:realtime_lag_seconds", now - committed)
            self._observe("sensorium:realtime_item_seconds", event.work_s)
        elif isinstance(event, Failed):
            # A model that writes while an item is spoken may fail before its commit.
            if event.item_id not in self._requests:
                self._requests[event.item_id] = now, self._start(now)
            self._requests.pop(event.item_id)[1].on_end(FinishReason.ERROR)
            self.num_failed += 1

    def _start(self, now: float) -> RequestClock:
        self.num_items += 1
        return RequestClock(self._metrics, arrived=now, params=SamplingParams(), clock=self._clock)

    def end(self, reason: str) -> None:
        """Count the end of the session, and of the items that were not transcribed."""
        for _, request in self._requests.values():
            request.on_end(FinishReason.ABORT)
        self._requests.clear()
        self.set_waiting(0.0)
        self._metrics.gauge(_ACTIVE).dec()
        self._metrics.counter("sensorium:realtime_sessions_total", reason).inc()
        self._observe("sensorium:realtime_session_seconds", self.elapsed_s)

    def _observe(self, name: str, seconds: float) -> None:
        self._metrics.histogram(name).observe(seconds)
