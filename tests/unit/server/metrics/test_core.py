"""What the core counts is what its scheduler did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from sensorium.engine.core_process.engine_core import EngineCore
from sensorium.engine.outputs.completions import make_children
from sensorium.multimodal.cache.shm import ShmReceiver, ShmSender
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.server.metrics.core import CoreMetrics
from sensorium.server.metrics.shared_files import Values
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange, Transfer
from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import SamplingParams
from tests.unit.multimodal.cache.item_building import make_item
from tests.unit.server.metrics.cores import NUM_ENCODED, NUM_ENCODER_BYTES, NUM_LOADED, make_core


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> CoreMetrics:
    return CoreMetrics("tiny", clock=clock)


def read(metrics: CoreMetrics) -> Values:
    return Values(metrics._metrics.registry)


def make_request(
    request_id: str, *, num_tokens: int = 8, max_tokens: int = 2, n: int = 1, token_id: int = 5
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=(token_id,) * num_tokens,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n, seed=0),
    )


def add(core: EngineCore, request: EngineCoreRequest, transfer: Transfer | None = None) -> None:
    assert core.add_request(request, transfer or Transfer()) is None


def run(core: EngineCore, metrics: CoreMetrics) -> None:
    while core.has_requests:
        metrics.on_step(core, core.step())


def test_tokens_of_prompts_and_steps_are_counted(metrics: CoreMetrics) -> None:
    core = make_core()
    add(core, make_request("a", num_tokens=8, max_tokens=3))
    add(core, make_request("b", num_tokens=5, max_tokens=2, token_id=6))
    run(core, metrics)
    values = read(metrics)
    assert values.get("vllm:prompt_tokens_total") == 13
    assert values.get("sensorium:sampled_tokens_total") == 5
    # The last token of each is never computed: 8 + 5 of the prompts, 2 + 1 of the outputs.
    assert values.get("vllm:iteration_tokens_total_sum") == 16
    assert values.get("vllm:iteration_tokens_total_count") == 3
    assert values.get("sensorium:core_requests_total", finished_reason="length") == 2


def test_a_prompt_is_counted_once_for_all_its_completions(metrics: CoreMetrics) -> None:
    core = make_core()
    for child in make_children(make_request("a", num_tokens=8, n=3)):
        add(core, child)
        run(core, metrics)
    values = read(metrics)
    assert values.get("vllm:prompt_tokens_total") == 8
    assert values.get("vllm:prompt_tokens_cached_total") == 0
    assert values.get("vllm:prompt_tokens_by_source_total", source="local_compute") == 8
    # Each completion looks its prompt up; the second block of it is computed by all.
    assert values.get("vllm:prefix_cache_queries_total") == 24
    assert values.get("vllm:prefix_cache_hits_total") == 8
    assert values.get("sensorium:core_requests_total", finished_reason="length") == 3


def test_cached_tokens_are_counted_separately_from_computed_ones(metrics: CoreMetrics) -> None:
    core = make_core()
    for request_id in ("a", "b"):
        add(core, make_request(request_id, num_tokens=9))
        run(core, metrics)
    values = read(metrics)
    assert values.get("vllm:prompt_tokens_total") == 18
    assert values.get("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 8
    assert values.get("vllm:prompt_tokens_by_source_total", source="local_compute") == 10
    assert values.get("sensorium:cache_hits_total", level="prefix") == 8
    assert values.get("sensorium:cache_queries_total", level="prefix") == 18
    assert values.get("sensorium:cache_items", level="prefix") > 0


def test_a_request_that_never_got_a_token_has_no_prompt_in_the_counts(metrics: CoreMetrics) -> None:
    core = make_core()
    add(core, make_request("a"))
    core.abort_requests(["a"])
    metrics.on_step(core)
    values = read(metrics)
    assert values.get("vllm:prompt_tokens_total") == 0
    assert values.get("sensorium:core_requests_total", finished_reason="abort") == 1


def test_the_queue_gauge_has_the_value_of_the_last_call(metrics: CoreMetrics) -> None:
    core = make_core()
    for index in range(6):  # 4 may run at once
        add(core, make_request(str(index), num_tokens=2, max_tokens=20))
    metrics.on_step(core, core.step())
    values = read(metrics)
    assert values.get("vllm:num_requests_running") == 4
    assert values.get("vllm:num_requests_waiting") == 2
    assert values.get("vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert values.get("vllm:kv_cache_usage_perc") == 4 / 16
    core.abort_requests([str(index) for index in range(6)])
    metrics.on_step(core)
    values = read(metrics)
    assert values.get("vllm:num_requests_running") == 0
    assert values.get("vllm:num_requests_waiting") == 0
    assert values.get("vllm:kv_cache_usage_perc") == 0


def test_preemptions_are_counted(metrics: CoreMetrics) -> None:
    core = make_core(num_blocks=6)
    for index in range(2):
        add(core, make_request(str(index), num_tokens=6, max_tokens=10, token_id=index))
    run(core, metrics)
    values = read(metrics)
    assert values.get("vllm:num_preemptions_total") > 0
    assert values.get("vllm:prompt_tokens_total") == 12
    assert values.get("sensorium:sampled_tokens_total") == 20


def test_most_metrics_are_written_a_few_times_a_second_under_load(
    metrics: CoreMetrics, clock: Clock
) -> None:
    core = make_core()
    add(core, make_request("a", max_tokens=9))
    metrics.on_step(core, core.step())
    assert read(metrics).get("sensorium:sampled_tokens_total") == 1
    clock.now = 0.1
    metrics.on_step(core, core.step())
    assert read(metrics).get("sensorium:sampled_tokens_total") == 1
    clock.now = 0.3
    metrics.on_step(core, core.step())
    assert read(metrics).get("sensorium:sampled_tokens_total") == 3


def make_media_request(request_id: str, *hashes: str) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(2 * len(hashes) + 2)),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
        mm_features=tuple(
            MultiModalFeatureSpec(
                modality="image", mm_hash=mm_hash, mm_position=PlaceholderRange(2 * index, 2)
            )
            for index, mm_hash in enumerate(hashes)
        ),
    )


def bring(*hashes: str) -> Transfer:
    return Transfer(payloads={mm_hash: make_item(mm_hash).kwargs for mm_hash in hashes})


def test_encoder_look_ups_and_contents_are_counted(metrics: CoreMetrics) -> None:
    core = make_core()
    add(core, make_media_request("a", "cat", "cat", "dog"), bring("cat", "dog"))
    run(core, metrics)
    values = read(metrics)
    assert values.get("sensorium:cache_queries_total", level="encoder") == 3
    assert values.get("sensorium:cache_hits_total", level="encoder") == 1
    assert values.get("sensorium:cache_items", level="encoder") == 2
    assert values.get("sensorium:cache_bytes", level="encoder") == NUM_ENCODER_BYTES
    assert values.get("sensorium:encoder_items_total", how="encoded") == NUM_ENCODED
    assert values.get("sensorium:encoder_items_total", how="loaded") == NUM_LOADED
    assert values.get("sensorium:encoder_cache_used_embeds") == 4
    assert values.get("sensorium:encoder_cache_evictable_embeds") == 4
    assert values.get("sensorium:encoder_cache_capacity_embeds") == 8
    add(core, make_media_request("b", "fox", "owl", "elk"), bring("fox", "owl", "elk"))
    run(core, metrics)
    assert read(metrics).get("sensorium:cache_evictions_total", level="encoder") == 1


@pytest.fixture
def store() -> Iterator[ShmStore]:
    with closing(ShmStore.create(capacity_bytes=1 << 16, max_object_bytes=1 << 15)) as store:
        yield store


def test_a_shared_store_is_described_by_the_core(metrics: CoreMetrics, store: ShmStore) -> None:
    core, sender = make_core(ShmReceiver(store)), ShmSender(store)
    metrics.sync(core)
    handles = [sender.get_and_update_item(name, make_item(name)) for name in ("cat", "dog")]
    kept = [handle for handle in handles if handle is not None]
    add(core, make_media_request("a", "cat", "dog"), sender.make_transfer(kept))
    run(core, metrics)
    values = read(metrics)
    assert values.get("sensorium:cache_items", level="processor") == 2
    assert values.get("sensorium:cache_bytes", level="processor") > 0
    assert values.get("sensorium:cache_capacity_bytes", level="processor") == 1 << 16
    assert values.get("sensorium:cache_queries_total", level="transfer") == 2
    assert values.get("sensorium:cache_hits_total", level="transfer") == 2
    # Look-ups are the frontends' to count.
    assert values.get("sensorium:cache_queries_total", level="processor") == 0


def test_a_core_that_is_started_again_counts_no_eviction_twice(store: ShmStore) -> None:
    sender = ShmSender(store)
    lives = []
    for life in range(2):
        core, metrics = make_core(ShmReceiver(store)), CoreMetrics("tiny")
        metrics.sync(core)
        for index in range(4):
            name = f"{life}-{index}"
            handle = sender.get_and_update_item(name, make_item(name, num_bytes=29_952))
            assert handle is not None
            sender.release([handle])
        metrics.sync(core)
        lives.append(read(metrics).get("sensorium:cache_evictions_total", level="processor"))
    assert min(lives) > 0
    assert sum(lives) == store.statistics().num_evictions
