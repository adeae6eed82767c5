"""Counts what loading media cost, and what it refused."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sensorium.multimodal.fetching.refusal import RefusalReason

SourceKind = Literal["bytes", "data", "file", "http"]  # given in process; by the kind of a URL
_Event = Literal["fetch", "response_cache_hit", "revalidation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStatistics:
    """`num_fetches`: requests to hosts, those after redirects included. `num_bytes`: of the bodies
    that came. `num_response_cache_hits`: answers that needed no request. `num_revalidations`:
    answers that a host confirmed without sending them again. `refusals`: items, by reason.
    `loaded_bytes`: of all items that were loaded, by kind of source, those of responses that were
    kept included.
    """

    num_fetches: int
    num_bytes: int
    num_response_cache_hits: int
    num_revalidations: int
    refusals: Mapping[RefusalReason, int]
    loaded_bytes: Mapping[SourceKind, int]


class FetchCounters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._events: Counter[_Event] = Counter()
        self._refusals: Counter[RefusalReason] = Counter()
        self._loaded_bytes: Counter[SourceKind] = Counter()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, event: _Event) -> None:
        with self._lock:
            self._events[event] += 1

    def add_bytes(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes

    def add_loaded(self, kind: SourceKind, num_bytes: int) -> None:
        with self._lock:
            self._loaded_bytes[kind] += num_bytes

    def add_refusal(self, reason: RefusalReason) -> None:
        with self._lock:
            self._refusals[reason] += 1

    def statistics(self) -> FetchStatistics:
        with self._lock:
            return FetchStatistics(
                num_fetches=self._events["fetch"],
                num_bytes=self._num_bytes,
                num_response_cache_hits=self._events["response_cache_hit"],
                num_revalidations=self._events["revalidation"],
                refusals=dict(self._refusals),
                loaded_bytes=dict(self._loaded_bytes),
            )
