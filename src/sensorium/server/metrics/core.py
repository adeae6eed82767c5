"""The metrics of the core: what its scheduler did, and what its caches hold.

A step only writes its own tokens and the lengths of the queues. The rest is written a few times a
second, and whenever the core has nothing to do, so that the values are complete then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sensorium.engine.core_process.engine_core import EngineCore
from sensorium.multimodal.cache.interface import CacheStatistics
from sensorium.multimodal.cache.shm import ShmReceiver
from sensorium.multimodal.tiers.tiers import MediaTiers
from sensorium.server.metrics.metric_set import MetricSet
from sensorium.server.metrics.totals import Totals
from sensorium.types.request import EngineCoreOutput, FinishReason
from sensorium.types.scheduling import StepMode

_SYNC_S = 0.25


class CoreMetrics:
    def __init__(self, model_name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics = MetricSet(model_name)
        self._clock = clock
        self._synced = float("-inf")
        self._num_scheduled_tokens = 0
        self._queue = (-1, -1, -1)
        self._is_described = False
        self._step_tokens = metrics.histogram("vllm:iteration_tokens_total")
        self._running = metrics.gauge("vllm:num_requests_running")
        self._waiting = metrics.gauge("vllm:num_requests_waiting")
        self._capacity = metrics.gauge("vllm:num_requests_waiting_by_reason", "capacity")
        self._deferred = metrics.gauge("vllm:num_requests_waiting_by_reason", "deferred")
        self._usage = metrics.gauge("vllm:kv_cache_usage_perc")
        self._totals = Totals(metrics)

    def on_step(self, core: EngineCore, _outputs: Sequence[EngineCoreOutput] = ()) -> None:
        """Write the token counts and queue lengths after a step, or after requests came or went."""
        scheduler = core.scheduler
        total = scheduler.counters.num_scheduled_tokens
        if total > self._num_scheduled_tokens:
            self._step_tokens.observe(total - self._num_scheduled_tokens)
            self._num_scheduled_tokens = total
        queue = len(scheduler.running), len(scheduler.waiting), len(scheduler.held)
        if queue != self._queue:
            self._queue = queue
            self._running.set(queue[0])
            self._waiting.set(queue[1] + queue[2])
            self._capacity.set(queue[1])
            self._deferred.set(queue[2])
        if not scheduler.requests or self._clock() - self._synced >= _SYNC_S:
            self.sync(core)

    def sync(self, core: EngineCore) -> None:
        """Write all metrics that `on_step` does not write after each step.

        Call it also when the core is ready, so that they are complete before the first request.
        """
        self._synced = self._clock()
        if not self._is_described:
            self._describe(core)
        self._sync_requests(core)
        self._sync_kv_cache(core)
        self._sync_encoder_cache(core)
        self._sync_receiver(core)

    def _describe(self, core: EngineCore) -> None:
        self._is_described = True
        kv_cache = core.scheduler.kv_cache
        self._metrics.gauge(
            "vllm:cache_config_info",
            str(kv_cache.block_size),
            str(sum(group.num_blocks for group in kv_cache.groups)),
            str(kv_cache.enable_prefix_caching),
        ).set(1)
        self._metrics.gauge("vllm:engine_sleep_state", "awake").set(1)

    def _sync_requests(self, core: EngineCore) -> None:
        counters = core.scheduler.counters
        num_prompt, num_cached = counters.num_prompt_tokens, counters.num_cached_prompt_tokens
        self._totals.follow("vllm:prompt_tokens_total", num_prompt)
        self._totals.follow("vllm:prompt_tokens_cached_total", num_cached)
        by_source = "vllm:prompt_tokens_by_source_total"
        self._totals.follow(by_source, num_prompt - num_cached, "local_compute")
        self._totals.follow(by_source, num_cached, "local_cache_hit")
        self._totals.follow("vllm:prompt_tokens_cached_by_source_total", num_cached, "device")
        self._totals.follow("sensorium:sampled_tokens_total", counters.num_sampled_tokens)
        self._totals.follow("vllm:num_preemptions_total", counters.num_preemptions)
        for mode in StepMode:
            self._totals.follow("sensorium:steps_total", counters.steps[mode], str(mode))
        for reason in FinishReason:
            count = counters.finished[reason]
            self._totals.follow("sensorium:core_requests_total", count, str(reason))

    def _sync_kv_cache(self, core: EngineCore) -> None:
        counters = core.scheduler.counters
        self._totals.follow("vllm:prefix_cache_queries_total", counters.num_prefix_queries)
        self._totals.follow("vllm:prefix_cache_hits_total", counters.num_prefix_hits)
        pools = core.scheduler.kv_cache.statistics()
        self._usage.set(max((pool.num_used / (pool.num_blocks - 1) for pool in pools), default=0))
        statistics = CacheStatistics(
            num_queries=counters.num_prefix_queries,
            num_hits=counters.num_prefix_hits,
            num_evictions=sum(pool.num_evictions for pool in pools),
            num_items=sum(pool.num_cached for pool in pools),
        )
        self._totals.follow_level("prefix", statistics)

    def _sync_encoder_cache(self, core: EngineCore) -> None:
        encoder = core.scheduler.encoder_cache.statistics()
        for word, value in (
            ("used", encoder.num_used_embeds),
            ("evictable", encoder.num_evictable_embeds),
            ("capacity", encoder.capacity),
        ):
            self._metrics.gauge(f"sensorium:encoder_cache_{word}_embeds").set(value)
        statistics = CacheStatistics(
            num_queries=encoder.num_queries,
            num_hits=encoder.num_hits,
            num_evictions=encoder.num_evictions,
            num_items=encoder.num_entries,
            num_bytes=core.runner.num_encoder_bytes,
        )
        self._totals.follow_level("encoder", statistics)
        runner = core.runner.encoder_runner
        items = "sensorium:encoder_items_total"
        self._totals.follow(items, runner.num_encoded, "encoded")
        self._totals.follow(items, runner.num_loaded, "loaded")
        if isinstance(runner.store, MediaTiers):
            self._totals.follow_tiers(runner.store, with_contents=True)

    def _sync_receiver(self, core: EngineCore) -> None:
        """Write the metrics of the cache through which the core receives processed media.

        A cache in shared memory is the processor cache of all frontends, and outlives the core with
        its counts. So only what was counted since this core began is added to the metrics.
        """
        receiver = core.payloads.receiver
        statistics = receiver.statistics()
        if not isinstance(receiver, ShmReceiver):
            self._totals.follow_level("transfer", statistics)
            return
        self._totals.follow_look_ups("transfer", statistics)
        evictions = "sensorium:cache_evictions_total"
        self._totals.follow(evictions, statistics.num_evictions, "processor", is_foreign=True)
        self._totals.follow(
            "sensorium:cache_oversize_total", statistics.num_oversize, is_foreign=True
        )
        self._totals.set_contents("processor", statistics)
