"""The table of all series that the server exposes, and `MetricSet`, to write them.

Names that begin with `vllm:` are those that dashboards for vLLM query, with the same meaning and
units. `docs/metrics.md` explains which process writes each of them, and when. All gauges are sums
over the processes that live. Each process has all series of the table, so none is ever missing; a
series that a process doesn't write stays 0 in that process.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import ITEM_STAGES, REMOTE_ENCODER_OUTCOMES, TIERS
from sensorium.types.request import FinishReason
from sensorium.types.scheduling import StepMode

_ENGINE = "0"  # the label of vLLM's data-parallel engines; there is only one here

# The stages of a request, in their order. `generate` is the time from its first token to its last;
# `decode` is that of media.
STAGES = (
    *("parse", "wait_thread", "render", "perceive", *ITEM_STAGES),
    *("transfer", "queue", "encode", "prefill", "generate"),
)
_CACHE_LEVELS = ("response", "processor", "readonly", "transfer", "encoder", "prefix", *TIERS)
_REFUSAL_REASONS = (
    *("bad_request", "body_too_large", "capacity", "draining", "engine_lost", "internal"),
    *("media", "missing_media", "not_found", "unauthorized"),
)
_SESSION_ENDS = ("client", "unread", "idle", "expired", "draining", "internal")
_FINISH_REASONS = tuple(map(str, FinishReason))
_ROUTES = ("/v1/chat/completions", "/v1/completions")

# The upper bounds of the buckets of histograms.
_LATENCY = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STAGE = (
    *(0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0),
)
_SESSION = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_TOKENS = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)
_STEP_TOKENS = tuple(float(2**e) for e in range(15))

_Metric = Counter | Gauge | Histogram
_MetricT = TypeVar("_MetricT", Counter, Gauge, Histogram)
_Values = tuple[str, ...]  # the values of a label that have a series from the start


@dataclass(frozen=True, slots=True)
class Definition:
    kind: type[_Metric]
    name: str
    text: str
    labels: dict[str, _Values]  # without those that all series of its prefix have
    buckets: tuple[float, ...] = ()  # of a histogram


def _count(name: str, text: str, **labels: _Values) -> Definition:
    return Definition(Counter, name, text, labels)


def _gauge(name: str, text: str, **labels: _Values) -> Definition:
    return Definition(Gauge, name, text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], **labels: _Values) -> Definition:
    return Definition(Histogram, name, text, labels, buckets)


DEFINITIONS = (
    # The core.
    _gauge("vllm:num_requests_running", "Requests in the running batch."),
    _gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled."),
    _gauge(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait to be scheduled, by what they wait for.",
        reason=("capacity", "deferred"),
    ),
    _gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 = all; the fullest group."),
    _gauge(
        "vllm:engine_sleep_state", "1 for the state that the engine is in.", sleep_state=("awake",)
    ),
    _gauge(
        "vllm:cache_config_info",
        "The configuration of the KV cache, in the labels; the value is 1.",
        **dict.fromkeys(("block_size", "num_gpu_blocks", "enable_prefix_caching"), ()),
    ),
    _count("vllm:num_preemptions_total", "Requests that had to give up their KV blocks."),
    _count("vllm:prompt_tokens_total", "Prompt tokens that were computed or found in the cache."),
    _count("vllm:prompt_tokens_cached_total", "Prompt tokens that were found in the cache."),
    _count(
        "vllm:prompt_tokens_by_source_total",
        "Prompt tokens by where they came from.",
        source=("local_compute", "local_cache_hit"),
    ),
    _count(
        "vllm:prompt_tokens_cached_by_source_total",
        "Prompt tokens that were found in the cache, by where it lies.",
        source=("device",),
    ),
    _count("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache."),
    _count("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache."),
    _histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKENS),
    _count(
        "sensorium:steps_total",
        "Steps, by how they were computed: as a CUDA graph, or without one and why.",
        mode=tuple(map(str, StepMode)),
    ),
    _count("sensorium:sampled_tokens_total", "Tokens sampled, whether or not they were read."),
    _count(
        "sensorium:core_requests_total",
        "Requests of the core that ended, by reason; one per completion.",
        finished_reason=_FINISH_REASONS,
    ),
    _gauge("sensorium:encoder_cache_used_embeds", "Embeddings in the encoder cache."),
    _gauge("sensorium:encoder_cache_evictable_embeds", "Cached embeddings that no request needs."),
    _gauge(
        "sensorium:encoder_cache_capacity_embeds",
        "The most embeddings that the encoder cache may hold.",
    ),
    # Requests.
    _count("vllm:generation_tokens_total", "Tokens generated for requests."),
    _count(
        "vllm:request_success_total",
        "Completions that ended, by reason.",
        finished_reason=_FINISH_REASONS,
    ),
    _histogram(
        "vllm:time_to_first_token_seconds",
        "Seconds from a request's arrival to its first token.",
        _LATENCY,
    ),
    _histogram(
        "vllm:inter_token_latency_seconds",
        "Seconds between two tokens of a completion.",
        _PER_TOKEN,
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean seconds per token of a completion, after its first token.",
        _PER_TOKEN,
    ),
    _histogram(
        "vllm:e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", _REQUEST
    ),
    _histogram(
        "vllm:request_queue_time_seconds",
        "Seconds that a request waits in the core before its first step.",
        _REQUEST,
    ),
    _histogram(
        "vllm:request_prefill_time_seconds",
        "Seconds from a request's first step to its first token.",
        _REQUEST,
    ),
    _histogram(
        "vllm:request_decode_time_seconds",
        "Seconds from a request's first token to its last.",
        _REQUEST,
    ),
    _histogram(
        "vllm:request_inference_time_seconds",
        "Seconds from a request's first step to its last token.",
        _REQUEST,
    ),
    _histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    _histogram("vllm:request_generation_tokens", "Generated tokens of a completion.", _TOKENS),
    _histogram(
        "vllm:request_max_num_generation_tokens",
        "Tokens of the longest completion of a request.",
        _TOKENS,
    ),
    _histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that were not in the prefix cache.",
        _TOKENS,
    ),
    _histogram("vllm:request_params_n", "Completions that a request asks for.", (1, 2, 5, 10, 20)),
    _histogram("vllm:request_params_max_tokens", "The max_tokens of a request.", _TOKENS),
    _histogram(
        "sensorium:stage_seconds",
        "Seconds that a request or a media item spends in a stage.",
        _STAGE,
        stage=STAGES,
    ),
    # Caches, and processes for media.
    _count("vllm:mm_cache_queries_total", "Media items looked up in the processor cache."),
    _count("vllm:mm_cache_hits_total", "Media items found in the processor cache."),
    *(
        _count(f"sensorium:cache_{word}_total", text, level=_CACHE_LEVELS)
        for word, text in (
            ("queries", "Look-ups in a cache, by level: media items; tokens at the level prefix."),
            ("hits", "Hits in a cache, by level: media items; tokens at the level prefix."),
            (
                "evictions",
                "Evictions from a cache, by level: media items; blocks at the level prefix.",
            ),
        )
    ),
    *(
        _gauge(f"sensorium:cache_{word}", text, level=_CACHE_LEVELS)
        for word, text in (
            ("items", "Contents of a cache, by level: media items; blocks at the level prefix."),
            ("bytes", "Bytes that a cache holds, by level."),
            (
                "capacity_bytes",
                "Bytes that a cache may hold, by level; 0 if the limit is not in bytes.",
            ),
        )
    ),
    _count(
        "sensorium:cache_resends_total", "Media items sent again, because the core had lost them."
    ),
    _count("sensorium:cache_oversize_total", "Media items for which the cache had no room."),
    _count(
        "sensorium:tier_writes_total",
        "Entries that were kept in a tier that outlives the process.",
        level=TIERS,
    ),
    _count(
        "sensorium:tier_faults_total",
        "Entries of a tier that were damaged, that its disk or network failed for, or that it had "
        "no time to keep or to look up.",
        level=TIERS,
        fault=("damaged", "failed", "dropped", "skipped"),
    ),
    _count(
        "sensorium:encoder_items_total",
        "Media items that the core got embeddings for, by what it did: run an encoder, or load "
        "what an encoder had computed before.",
        how=("encoded", "loaded"),
    ),
    _count(
        "sensorium:apart_items_total",
        "Media items that were meant for the remote encoder, by what became of them.",
        outcome=REMOTE_ENCODER_OUTCOMES,
    ),
    _count("sensorium:items_joined_total", "Media items that another request was processing."),
    _count("sensorium:media_fetches_total", "Requests to hosts of media."),
    _count("sensorium:media_bytes_fetched_total", "Bytes of media that came from hosts."),
    _count(
        "sensorium:media_bytes_total",
        "Bytes of media that were loaded, by kind of source.",
        source=("bytes", "data", "file", "http"),
    ),
    _count("sensorium:media_refusals_total", "Media that was not loaded, by reason.", reason=()),
    _gauge("sensorium:pool_workers", "Processes of the media pool that are ready."),
    _gauge("sensorium:pool_queued", "Media items that wait for a process of the media pool."),
    _gauge("sensorium:pool_running", "Media items that a process of the media pool is working on."),
    _count(
        "sensorium:pool_jobs_total",
        "Media items that left the media pool, by outcome.",
        outcome=("done", "failed", "cancelled"),
    ),
    _count("sensorium:pool_restarts_total", "Processes of the media pool that had to be replaced."),
    # HTTP, and the processes of the server.
    _gauge("sensorium:http_requests_in_flight", "Requests between arrival and last byte."),
    _gauge("sensorium:num_requests_preparing", "Requests that the core has not taken yet."),
    _gauge("vllm:websocket_connections_active", "Open WebSocket connections."),
    _gauge("sensorium:realtime_sessions_active", "Sessions at /v1/realtime that are open."),
    _count(
        "sensorium:realtime_sessions_total",
        "Sessions at /v1/realtime that ended, by why.",
        end=_SESSION_ENDS,
    ),
    _histogram(
        "sensorium:realtime_session_seconds", "Seconds of a session at /v1/realtime.", _SESSION
    ),
    _count("sensorium:realtime_audio_seconds_total", "Seconds of audio that sessions have sent."),
    _gauge(
        "sensorium:realtime_waiting_seconds",
        "Seconds of audio that sessions hold and that are not transcribed yet.",
    ),
    _histogram(
        "sensorium:realtime_chunk_seconds",
        "Seconds until a chunk of audio was decoded, and taken by its session.",
        _LAG,
    ),
    _histogram(
        "sensorium:realtime_lag_seconds",
        "Seconds from the end of an item's audio to the end of its transcript.",
        _REQUEST,
    ),
    _histogram(
        "sensorium:realtime_item_seconds",
        "Seconds that transcribing an item takes, without the wait for items before it. If the "
        "model writes while an item is spoken: only those after the end of the item's audio.",
        _REQUEST,
    ),
    _count(
        "sensorium:refused_requests_total",
        "Requests that were answered with an error, by reason.",
        reason=_REFUSAL_REASONS,
    ),
    _count(
        "sensorium:scale_requests_total",
        "Calls of engines that were placed by a key, in a cluster.",
    ),
    _count(
        "sensorium:scale_spills_total",
        "Calls that did not go to the home of their key, because that had too much to do.",
    ),
    _count(
        "sensorium:scale_retries_total",
        "Calls of engines that were repeated: their engine was lost, it lacked a file, or another "
        "one knows the media.",
        reason=("lost", "missing", "moved"),
    ),
    _histogram(
        "sensorium:event_loop_lag_seconds",
        "Seconds by which a frontend's event loop was late.",
        _LAG,
    ),
    _count(
        "sensorium:process_restarts_total",
        "Processes that ended and were started again.",
        kind=("core", "frontend"),
    ),
    _count("sensorium:core_stalls_total", "Times that the core made no progress for too long."),
    _count(
        "http_requests_total",
        "Requests by route, method and class of status.",
        handler=_ROUTES,
        method=("POST",),
        status=("2xx", "4xx", "5xx"),
    ),
    _histogram(
        "http_request_duration_seconds",
        "Seconds from a request's arrival to the last byte of its response.",
        (0.1, 0.5, 1.0, 10.0),
        handler=_ROUTES,
        method=("POST",),
    ),
)

# Other names of the same series: alias -> name. They are made when metrics are read, because
# dashboards ask for either.
ALIASES = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}


class MetricSet:
    """All metrics of `DEFINITIONS`, as one process writes them.

    Values are stored in the files that `shared_files.write_as` has chosen; without that call they
    stay in this process, which is enough for a test.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._metrics = {definition.name: self._make(definition) for definition in DEFINITIONS}
        self._series: dict[tuple[str, ...], _Metric] = {}  # name and label values -> series
        for definition in DEFINITIONS:
            for label_values in product(*definition.labels.values()):
                self._find(definition.name, label_values)

    def counter(self, name: str, *label_values: str) -> Counter:
        """Return the counter with this name and these label values, in the order of its definition.

        Labels that all metrics share, such as `model_name`, are added. Raise an `InvariantError` if
        the metric is no counter.
        """
        return self._get(Counter, name, label_values)

    def gauge(self, name: str, *label_values: str) -> Gauge:
        return self._get(Gauge, name, label_values)

    def histogram(self, name: str, *label_values: str) -> Histogram:
        return self._get(Histogram, name, label_values)

    def _get(self, kind: type[_MetricT], name: str, label_values: _Values) -> _MetricT:
        series = self._find(name, label_values)
        if not isinstance(series, kind):
            raise InvariantError(f"the metric {name} is no {kind.__name__.lower()}")
        return series

    def _find(self, name: str, label_values: _Values) -> _Metric:
        key = (name, *label_values)
        if (series := self._series.get(key)) is None:
            common = _get_common_labels(name, self._model_name).values()
            series = self._series[key] = self._metrics[name].labels(*common, *label_values)
        return series

    def _make(self, definition: Definition) -> _Metric:
        options: dict[str, Any] = {}
        if definition.kind is Gauge:
            options["multiprocess_mode"] = "livesum"
        elif definition.kind is Histogram:
            options["buckets"] = definition.buckets
        labels = (*_get_common_labels(definition.name, self._model_name), *definition.labels)
        return definition.kind(
            definition.name, definition.text, labels, registry=self.registry, **options
        )


def _get_common_labels(name: str, model_name: str) -> dict[str, str]:
    """Return the labels that all metrics with the prefix of `name` share, as label -> value."""
    if name.startswith("vllm:"):
        return {"model_name": model_name, "engine": _ENGINE}
    return {"model_name": model_name} if name.startswith("sensorium:") else {}
