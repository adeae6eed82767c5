"""Every series that the server exposes: its name, type, labels and buckets.

Names that begin with `vllm:` are those that dashboards of this field query, with the meaning and
the units that they have there. `docs/metrics.md` explains who writes each of them, and when.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from sensorium.types.multimodal import ITEM_STAGES
from sensorium.types.request import FinishReason
from sensorium.types.scheduling import StepMode

ENGINE = "0"  # the label of vLLM's data-parallel engines; there is only one here

# The stages of a request, in their order. `generate` is the time from its first token to its last;
# `decode` is that of media.
STAGES = (
    "parse",
    "wait_thread",
    "render",
    "perceive",
    *ITEM_STAGES,
    "transfer",
    "queue",
    "encode",
    "prefill",
    "generate",
)
CACHE_LEVELS = ("response", "processor", "readonly", "transfer", "encoder", "prefix")
REFUSAL_REASONS = (
    "bad_request",
    "body_too_large",
    "capacity",
    "draining",
    "engine_lost",
    "internal",
    "media",
    "missing_media",
    "not_found",
    "unauthorized",
)
PROCESS_KINDS = ("core", "frontend")
MEDIA_SOURCES = ("bytes", "data", "file", "http")
_ROUTES = ("/v1/chat/completions", "/v1/completions")
_STATUSES = ("2xx", "4xx", "5xx")

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
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_TOKENS = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)
_STEP_TOKENS = tuple(float(2**e) for e in range(15))


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One metric of the table, with all its series."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()  # without those that all series of its prefix have
    values: tuple[tuple[str, ...], ...] = ((),)  # of its labels, that exist from the start
    buckets: tuple[float, ...] = ()


def _count(name: str, text: str, **details: Any) -> Definition:
    return Definition(name=name, kind="counter", text=text, **details)


def _gauge(name: str, text: str, **details: Any) -> Definition:
    return Definition(name=name, kind="gauge", text=text, **details)


def _histogram(name: str, text: str, buckets: tuple[float, ...], **details: Any) -> Definition:
    return Definition(name=name, kind="histogram", text=text, buckets=buckets, **details)


def _each(values: tuple[str, ...]) -> tuple[tuple[str], ...]:
    return tuple((value,) for value in values)


_REASONS = _each(tuple(str(reason) for reason in FinishReason))
_LEVELS = _each(CACHE_LEVELS)

_OF_THE_CORE = (
    _gauge("vllm:num_requests_running", "Requests in the running batch."),
    _gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled."),
    _gauge(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait to be scheduled, by what they wait for.",
        labels=("reason",),
        values=(("capacity",),),
    ),
    _gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 = all; the fullest group."),
    _gauge(
        "vllm:engine_sleep_state",
        "1 for the state that the engine is in.",
        labels=("sleep_state",),
        values=(("awake",),),
    ),
    _gauge(
        "vllm:cache_config_info",
        "What was resolved for the KV cache; the value is 1.",
        labels=("block_size", "num_gpu_blocks", "enable_prefix_caching"),
        values=(),
    ),
    _count("vllm:num_preemptions_total", "Requests that had to give up their KV blocks."),
    _count("vllm:prompt_tokens_total", "Prompt tokens that were computed or found in the cache."),
    _count("vllm:prompt_tokens_cached_total", "Prompt tokens that were found in the cache."),
    _count(
        "vllm:prompt_tokens_by_source_total",
        "Prompt tokens by where they came from.",
        labels=("source",),
        values=(("local_compute",), ("local_cache_hit",)),
    ),
    _count(
        "vllm:prompt_tokens_cached_by_source_total",
        "Prompt tokens that were found in the cache, by where it lies.",
        labels=("source",),
        values=(("device",),),
    ),
    _count("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache."),
    _count("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache."),
    _histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKENS),
    _count(
        "sensorium:steps_total",
        "Steps, by how they were computed: as a CUDA graph, or without one and why.",
        labels=("mode",),
        values=_each(tuple(str(mode) for mode in StepMode)),
    ),
    _count("sensorium:sampled_tokens_total", "Tokens sampled, whether or not they were read."),
    _count(
        "sensorium:core_requests_total",
        "Requests of the core that ended, by reason; one per completion.",
        labels=("finished_reason",),
        values=_REASONS,
    ),
    _gauge("sensorium:encoder_cache_used_embeds", "Embeddings in the encoder cache."),
    _gauge(
        "sensorium:encoder_cache_evictable_embeds",
        "Cached embeddings that no request needs.",
    ),
    _gauge("sensorium:encoder_cache_capacity_embeds", "What the encoder cache may hold."),
)

_OF_REQUESTS = (
    _count("vllm:generation_tokens_total", "Tokens generated for requests."),
    _count(
        "vllm:request_success_total",
        "Completions that ended, by reason.",
        labels=("finished_reason",),
        values=_REASONS,
    ),
    _histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _LATENCY),
    _histogram("vllm:inter_token_latency_seconds", "Between tokens of a completion.", _PER_TOKEN),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per token after the first.",
        _PER_TOKEN,
    ),
    _histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _REQUEST),
    _histogram("vllm:request_queue_time_seconds", "In the core, before it ran.", _REQUEST),
    _histogram("vllm:request_prefill_time_seconds", "From its first step to a token.", _REQUEST),
    _histogram("vllm:request_decode_time_seconds", "From its first token to its last.", _REQUEST),
    _histogram("vllm:request_inference_time_seconds", "Prefill and decode together.", _REQUEST),
    _histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    _histogram("vllm:request_generation_tokens", "Tokens of a completion.", _TOKENS),
    _histogram(
        "vllm:request_max_num_generation_tokens",
        "Tokens of its longest one.",
        _TOKENS,
    ),
    _histogram("vllm:request_prefill_kv_computed_tokens", "Prompt tokens not cached.", _TOKENS),
    _histogram("vllm:request_params_n", "Completions that a request asks for.", (1, 2, 5, 10, 20)),
    _histogram("vllm:request_params_max_tokens", "The max_tokens of a request.", _TOKENS),
    _histogram(
        "sensorium:stage_seconds",
        "Time in a stage: of a request, or of a media item.",
        _STAGE,
        labels=("stage",),
        values=_each(STAGES),
    ),
)

_OF_CACHES = (
    _count("vllm:mm_cache_queries_total", "Media items looked up in the processor cache."),
    _count("vllm:mm_cache_hits_total", "Media items found in the processor cache."),
    *(
        _count(f"sensorium:cache_{word}_total", text, labels=("level",), values=_LEVELS)
        for word, text in (
            ("queries", "Looked up, by level: items; tokens at the level prefix."),
            ("hits", "Found, by level: items; tokens at the level prefix."),
            ("evictions", "Evicted, by level: items; blocks at the level prefix."),
        )
    ),
    *(
        _gauge(f"sensorium:cache_{word}", text, labels=("level",), values=_LEVELS)
        for word, text in (
            ("items", "Kept, by level: items; blocks at the level prefix."),
            ("bytes", "Kept, by level."),
            ("capacity_bytes", "What may be kept, by level; 0 if it isn't counted in bytes."),
        )
    ),
    _count("sensorium:cache_resends_total", "Items sent again, because the core had lost them."),
    _count("sensorium:cache_oversize_total", "Items that no room could be made for."),
    _count("sensorium:items_joined_total", "Items that another request was processing already."),
    _count("sensorium:media_fetches_total", "Requests to hosts of media."),
    _count("sensorium:media_bytes_fetched_total", "Bytes of media that came from hosts."),
    _count(
        "sensorium:media_bytes_total",
        "Bytes of media that were loaded, by kind of source.",
        labels=("source",),
        values=_each(MEDIA_SOURCES),
    ),
    _count(
        "sensorium:media_refusals_total",
        "Media that was not loaded, by reason.",
        labels=("reason",),
        values=(),
    ),
    _gauge("sensorium:pool_workers", "Processes that decode and process media, ready ones."),
    _gauge("sensorium:pool_queued", "Items that wait for such a process."),
    _gauge("sensorium:pool_running", "Items that such a process has in hand."),
    _count(
        "sensorium:pool_jobs_total",
        "Items that left the pool, by outcome.",
        labels=("outcome",),
        values=(("done",), ("failed",), ("cancelled",)),
    ),
    _count("sensorium:pool_restarts_total", "Processes of the pool that had to be replaced."),
)

_OF_HTTP = (
    _gauge("sensorium:http_requests_in_flight", "Requests between arrival and last byte."),
    _gauge("sensorium:num_requests_preparing", "Requests that the core has not taken yet."),
    _gauge("vllm:websocket_connections_active", "Open WebSocket connections."),
    _count(
        "sensorium:refused_requests_total",
        "Requests that were answered with an error before or instead of an answer, by reason.",
        labels=("reason",),
        values=_each(REFUSAL_REASONS),
    ),
    _histogram("sensorium:event_loop_lag_seconds", "How late a frontend's loop was.", _LAG),
    _count(
        "sensorium:process_restarts_total",
        "Processes that ended and were started again.",
        labels=("kind",),
        values=_each(PROCESS_KINDS),
    ),
    _count("sensorium:core_stalls_total", "Times that the core made no progress for too long."),
    _count(
        "http_requests_total",
        "Requests by route, method and class of status.",
        labels=("handler", "method", "status"),
        values=tuple(product(_ROUTES, ("POST",), _STATUSES)),
    ),
    _histogram(
        "http_request_duration_seconds",
        "From a request's arrival to the last byte of its answer.",
        (0.1, 0.5, 1.0, 10.0),
        labels=("handler", "method"),
        values=tuple(product(_ROUTES, ("POST",))),
    ),
)

DEFINITIONS: tuple[Definition, ...] = (*_OF_THE_CORE, *_OF_REQUESTS, *_OF_CACHES, *_OF_HTTP)

# Other names of the same series: alias -> name. They are made when metrics are read, because
# dashboards ask for either.
ALIASES = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}


def get_common_labels(name: str, model_name: str) -> dict[str, str]:
    """Return the labels that all series with this prefix have."""
    if name.startswith("vllm:"):
        return {"model_name": model_name, "engine": ENGINE}
    return {"model_name": model_name} if name.startswith("sensorium:") else {}
