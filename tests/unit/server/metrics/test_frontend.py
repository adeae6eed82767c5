"""What a frontend takes over from its parts is what these have counted."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from sensorium.engine.assembly.frontend import Caches, MediaParts
from sensorium.multimodal.cache.interface import SenderCache
from sensorium.multimodal.cache.item_table import ItemTable
from sensorium.multimodal.cache.mirror import MirrorSender
from sensorium.multimodal.cache.shm import ShmSender
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.names import MediaHasher, UuidBindings
from sensorium.multimodal.pipeline import MediaPipeline
from sensorium.multimodal.pool.pool import PoolStatistics
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.single_flight import Flight
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.server.metrics.shared_files import Values
from sensorium.types.errors import RequestError
from sensorium.types.sampling import SamplingParams
from tests.support.loading import BlockingLoader
from tests.unit.multimodal.cache.item_building import make_item

CAPACITY = 4096


class NoBackend:
    def start(self, job: ItemJob, media: object) -> Flight:
        raise NotImplementedError


def make_media_parts(sender: SenderCache, store: ShmStore | None = None) -> MediaParts:
    limits = MediaLimits()
    loader = BlockingLoader(limits)
    readonly = ItemTable(CAPACITY)

    def make_pipeline() -> MediaPipeline:
        return MediaPipeline(
            cache=sender,
            hasher=MediaHasher(),
            loader=loader,
            backend=NoBackend(),
            uuids=UuidBindings(),
            limits=limits,
        )

    return MediaParts(
        caches=Caches(sender=sender, readonly=readonly, store=store),
        pipeline=make_pipeline(),
        readonly=make_pipeline(),
        loader=loader,
        pool=None,
    )


@pytest.fixture
def media_parts() -> Iterator[MediaParts]:
    media_parts = make_media_parts(MirrorSender(CAPACITY, epoch=1))
    yield media_parts
    media_parts.close()


@pytest.fixture
def metrics() -> FrontendMetrics:
    return FrontendMetrics("tiny")


def read(metrics: FrontendMetrics) -> Values:
    return Values(metrics._metrics.registry)


def look_up(sender: SenderCache, *names: str, num_bytes: int = 128) -> None:
    for name in names:
        handle = sender.get_and_update_item(name, make_item(name, num_bytes))
        assert handle is not None
        sender.release([handle])


def test_repeated_look_ups_of_one_item_are_counted_once(
    metrics: FrontendMetrics, media_parts: MediaParts
) -> None:
    sender = media_parts.caches.sender
    look_up(sender, "cat", "dog", "cat")
    metrics.sync(media_parts=media_parts)
    metrics.sync(media_parts=media_parts)
    values = read(metrics)
    assert values.get("vllm:mm_cache_queries_total") == 3
    assert values.get("vllm:mm_cache_hits_total") == 1
    look_up(sender, "dog")
    metrics.sync(media_parts=media_parts)
    values = read(metrics)
    assert values.get("vllm:mm_cache_queries_total", model_name="tiny") == 4
    assert values.get("sensorium:cache_queries_total", level="processor") == 4
    assert values.get("sensorium:cache_hits_total", level="processor") == 2
    assert values.get("sensorium:cache_items", level="processor") == 2
    assert values.get("sensorium:cache_capacity_bytes", level="processor") == CAPACITY


def test_render_only_requests_are_counted_as_readonly_hits(
    metrics: FrontendMetrics, media_parts: MediaParts
) -> None:
    readonly = media_parts.caches.readonly
    for _ in range(2):
        handle = readonly.get_and_update_item("cat", make_item("cat"))
        assert handle is not None
        readonly.release([handle])
    metrics.sync(media_parts=media_parts)
    values = read(metrics)
    assert values.get("sensorium:cache_hits_total", level="readonly") == 1
    assert values.get("vllm:mm_cache_queries_total") == 0


def test_the_frontend_counts_evictions_of_a_private_cache(
    metrics: FrontendMetrics, media_parts: MediaParts
) -> None:
    look_up(media_parts.caches.sender, *map(str, range(8)), num_bytes=1024)
    metrics.sync(media_parts=media_parts)
    values = read(metrics)
    num_evictions = media_parts.caches.sender.statistics().num_evictions
    assert num_evictions > 0
    assert values.get("sensorium:cache_evictions_total", level="processor") == num_evictions


def test_the_core_counts_what_a_shared_store_holds(metrics: FrontendMetrics) -> None:
    store = ShmStore.create(capacity_bytes=1 << 16, max_object_bytes=1 << 15)
    media_parts = make_media_parts(ShmSender(store), store)
    look_up(media_parts.caches.sender, "cat", "cat")
    look_up(media_parts.caches.sender, *map(str, range(4)), num_bytes=29_952)
    metrics.sync(media_parts=media_parts)
    values = read(metrics)
    assert store.statistics().num_evictions > 0
    assert values.get("vllm:mm_cache_queries_total") == 6
    assert values.get("vllm:mm_cache_hits_total") == 1
    assert values.get("sensorium:cache_items", level="processor") == 0
    assert values.get("sensorium:cache_bytes", level="processor") == 0
    assert values.get("sensorium:cache_evictions_total", level="processor") == 0
    media_parts.close()


def test_media_is_counted_by_source_and_by_reason_of_refusal(
    metrics: FrontendMetrics, media_parts: MediaParts
) -> None:
    empty = "data:image/png;base64,"
    with pytest.raises(RequestError):
        media_parts.loader.load(empty, "image")
    media_parts.loader.load(empty + base64.b64encode(b"pixels").decode(), "image")
    metrics.sync(media_parts=media_parts)
    values = read(metrics)
    assert values.get("sensorium:media_refusals_total", reason="empty") == 1
    assert values.get("sensorium:media_bytes_total", source="data") == len(b"pixels")
    assert values.get("sensorium:media_bytes_total") == len(b"pixels")


def test_the_work_of_a_pool_is_counted(metrics: FrontendMetrics) -> None:
    """Its own counts are tested with real processes; here they are only taken over."""
    statistics = PoolStatistics(
        num_workers=4,
        num_queued=3,
        num_running=2,
        num_restarts=1,
        num_done=9,
        num_failed=6,
        num_cancelled=5,
    )
    for _ in range(2):
        metrics._sync_pool(statistics)
    values = read(metrics)
    gauges = [values.get(f"sensorium:pool_{word}") for word in ("workers", "queued", "running")]
    assert gauges == [4, 3, 2]
    assert values.get("sensorium:pool_restarts_total") == 1
    outcomes = ("done", "failed", "cancelled")
    counts = [values.get("sensorium:pool_jobs_total", outcome=outcome) for outcome in outcomes]
    assert counts == [9, 6, 5]


def test_requests_before_the_core_are_a_queue(metrics: FrontendMetrics) -> None:
    metrics.sync(num_preparing=2)
    assert read(metrics).get("sensorium:num_requests_preparing") == 2
    metrics.sync(num_preparing=0)
    assert read(metrics).get("sensorium:num_requests_preparing") == 0


def test_the_load_is_the_number_of_requests_in_flight(metrics: FrontendMetrics) -> None:
    with metrics.track_arrival(), metrics.track_arrival():
        assert metrics.get_load() == 2
    assert metrics.get_load() == 0
    with pytest.raises(ValueError, match="broken"), metrics.track_arrival():
        raise ValueError("broken")
    assert metrics.get_load() == 0


def test_responses_are_counted_by_route_and_class_of_status(metrics: FrontendMetrics) -> None:
    for status, seconds in ((200, 1.0), (201, 2.0), (503, 0.5)):
        metrics.observe_response(handler="/x", method="POST", status=status, seconds=seconds)
    values = read(metrics)
    assert values.get("http_requests_total", handler="/x", status="2xx") == 2
    assert values.get("http_requests_total", handler="/x", status="5xx") == 1
    assert values.get("http_request_duration_seconds_sum", handler="/x") == 3.5


def test_refusals_sockets_and_lag_are_counted(metrics: FrontendMetrics) -> None:
    metrics.count_refusal("capacity")
    metrics.observe_loop_lag(0.02)
    with metrics.track_websocket():
        values = read(metrics)
    assert values.get("sensorium:refused_requests_total", reason="capacity") == 1
    assert values.get("vllm:websocket_connections_active") == 1
    assert values.get("sensorium:event_loop_lag_seconds_bucket", le="0.025") == 1
    assert values.get("sensorium:event_loop_lag_seconds_bucket", le="0.01") == 0


def test_an_alias_has_the_same_values_as_its_metric(metrics: FrontendMetrics) -> None:
    clock = metrics.start_request(arrived=0.0, params=SamplingParams())
    clock.on_tokens(0, 1)
    clock.on_tokens(0, 1)
    lines = metrics.render()[0].decode().splitlines()
    counts = [line.split()[-1] for line in lines if "token_latency_seconds_count{" in line]
    aliases = [line.split()[-1] for line in lines if "per_output_token_seconds_count{" in line]
    assert counts == ["1.0"]
    # The mean of a request that has not ended, and the other name of the time between tokens.
    assert sorted(aliases) == ["0.0", "1.0"]
