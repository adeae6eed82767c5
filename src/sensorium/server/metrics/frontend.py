"""The metrics of a frontend: HTTP requests, how they ended, and the counts of its caches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from sensorium.server.metrics.clock import RequestClock
from sensorium.server.metrics.metric_set import MetricSet
from sensorium.server.metrics.realtime import SessionClock
from sensorium.server.metrics.shared_files import Files, Values, get_directory, render
from sensorium.server.metrics.totals import Totals

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from sensorium.engine.assembly.frontend import Caches, MediaParts
    from sensorium.multimodal.fetching.fetch import FetchStatistics
    from sensorium.multimodal.pool.pool import PoolStatistics
    from sensorium.types.sampling import SamplingParams

_IN_FLIGHT = "sensorium:http_requests_in_flight"


class FrontendMetrics:
    """A writer of one frontend's metrics and reader of all processes', for the event loop only."""

    def __init__(self, model_name: str) -> None:
        self._metrics = MetricSet(model_name)
        self._totals = Totals(self._metrics)

    # ---- HTTP

    def track_arrival(self) -> AbstractContextManager[None]:
        """Return a context manager for a request in flight, to be left after its last byte."""
        return self._metrics.gauge(_IN_FLIGHT).track_inprogress()

    def track_websocket(self) -> AbstractContextManager[None]:
        return self._metrics.gauge("vllm:websocket_connections_active").track_inprogress()

    def start_session(self) -> SessionClock:
        return SessionClock(self._metrics)

    def count_refusal(self, reason: str) -> None:
        """Count a request that was answered with an error, by one of `_REFUSAL_REASONS`."""
        self._metrics.counter("sensorium:refused_requests_total", reason).inc()

    def observe_response(self, *, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP response, and record the seconds from its request's arrival to its end.

        `handler` is the path of the route as declared. Paths without a route share one name, so
        that unknown paths do not create metrics without end.
        """
        kind = f"{status // 100}xx"
        self._metrics.counter("http_requests_total", handler, method, kind).inc()
        self._metrics.histogram("http_request_duration_seconds", handler, method).observe(seconds)

    def observe_loop_lag(self, seconds: float) -> None:
        """Record how many seconds too late the event loop ran a timer."""
        self._metrics.histogram("sensorium:event_loop_lag_seconds").observe(seconds)

    # ---- requests of the engine

    def start_request(self, *, arrived: float, params: SamplingParams) -> RequestClock:
        """Return a clock of one request; `arrived` is in seconds of `time.monotonic`."""
        return RequestClock(self._metrics, arrived=arrived, params=params)

    # ---- counts of other parts

    def sync(self, *, media_parts: MediaParts | None = None, num_preparing: int = 0) -> None:
        """Copy into the metrics the counts that other parts of this frontend keep.

        `num_preparing` counts requests that are not sent to the core yet. This takes microseconds.
        It is called at the end of each response and about once a second.
        """
        self._metrics.gauge("sensorium:num_requests_preparing").set(num_preparing)
        if media_parts is None:
            return
        self._sync_caches(media_parts.caches)
        if media_parts.tiers is not None:
            self._totals.follow_tiers(media_parts.tiers, with_contents=False)
        if media_parts.remote_encoder is not None:
            for outcome, count in media_parts.remote_encoder.backend.get_counts().items():
                self._totals.follow("sensorium:apart_items_total", count, outcome)
        self._sync_loader(media_parts.loader.statistics())
        joined = media_parts.pipeline.flights.num_joined
        self._totals.follow("sensorium:items_joined_total", joined)
        if media_parts.pool is not None:
            self._sync_pool(media_parts.pool.statistics())

    def _sync_caches(self, caches: Caches) -> None:
        sender, totals = caches.sender.statistics(), self._totals
        totals.follow("vllm:mm_cache_queries_total", sender.num_queries)
        totals.follow("vllm:mm_cache_hits_total", sender.num_hits)
        totals.follow("sensorium:cache_resends_total", sender.num_resends)
        if caches.store is None:
            totals.follow_level("processor", sender)
            totals.follow("sensorium:cache_oversize_total", sender.num_oversize)
        else:
            # Its contents and evictions are the same for all frontends, so the core writes them.
            totals.follow_look_ups("processor", sender)
        totals.follow_level("readonly", caches.readonly.statistics())

    def _sync_loader(self, fetched: FetchStatistics) -> None:
        totals = self._totals
        # Every address is looked up in the cache and fetched if it is not there. A fetch in which
        # the host confirms that the kept response is still good counts as a hit.
        num_hits = fetched.num_response_cache_hits
        totals.follow("sensorium:cache_queries_total", num_hits + fetched.num_fetches, "response")
        totals.follow(
            "sensorium:cache_hits_total", num_hits + fetched.num_revalidations, "response"
        )
        totals.follow("sensorium:media_fetches_total", fetched.num_fetches)
        totals.follow("sensorium:media_bytes_fetched_total", fetched.num_bytes)
        for source, num_bytes in fetched.loaded_bytes.items():
            totals.follow("sensorium:media_bytes_total", num_bytes, source)
        for reason, count in fetched.refusals.items():
            totals.follow("sensorium:media_refusals_total", count, reason)

    def _sync_pool(self, pool: PoolStatistics) -> None:
        self._metrics.gauge("sensorium:pool_workers").set(pool.num_workers)
        self._metrics.gauge("sensorium:pool_queued").set(pool.num_queued)
        self._metrics.gauge("sensorium:pool_running").set(pool.num_running)
        self._totals.follow("sensorium:pool_restarts_total", pool.num_restarts)
        for outcome, count in (
            ("done", pool.num_done),
            ("failed", pool.num_failed),
            ("cancelled", pool.num_cancelled),
        ):
            self._totals.follow("sensorium:pool_jobs_total", count, outcome)

    # ---- reading the metrics of all processes

    async def read_others(self) -> Sequence[bytes]:
        """Return metrics of processes that write no files here: none, except in a cluster."""
        return ()

    def render(self, others: Sequence[bytes] = ()) -> tuple[bytes, str]:
        """Return the body and content type of `GET /metrics`; `others` are from `read_others`."""
        return render(self._get_source("*.db", others))

    def get_load(self, others: Sequence[bytes] = ()) -> int:
        """Return the number of HTTP requests in flight in all frontends together."""
        return round(Values(self._get_source("gauge_*.db", others)).get(_IN_FLIGHT))

    def _get_source(self, pattern: str, others: Sequence[bytes]) -> Collector:  # noqa: ARG002
        directory = get_directory()
        return self._metrics.registry if directory is None else Files(directory, pattern)
