"""Makes the `sensorium_trace` object of an answer: its times, and the caches that served it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sensorium.server.metrics.clock import get_request_stages
from sensorium.server.metrics.definitions import STAGES

if TYPE_CHECKING:
    from sensorium.server.metrics.clock import RequestClock
    from sensorium.types.outputs import MediaItemReport, RequestOutput


def make_trace(output: RequestOutput, clock: RequestClock) -> dict[str, Any]:
    """Return the trace of an answer.

    The stages of media items are sums over the items. These are processed side by side, so a sum
    may be longer than `total`. Stages that did not happen are left out.
    """
    seconds: Counter[str] = Counter()
    for stages in (clock.stages, get_request_stages(output)):
        seconds.update(stages)
    for item in output.mm_items:
        seconds.update(item.times)
    return {
        "request_id": output.request_id,
        "ms": _as_ms(seconds) | {"total": _round(clock.elapsed_s)},
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "items": [_trace_item(item, output) for item in output.mm_items],
    }


def _trace_item(item: MediaItemReport, output: RequestOutput) -> dict[str, Any]:
    is_in_prefix = item.prompt_end is not None and item.prompt_end <= output.num_cached_tokens
    return {
        "modality": item.modality,
        "mm_hash": item.mm_hash,
        "processor": "hit" if item.is_processor_hit else "miss",
        "transfer": item.transfer,
        "encoder": _describe_encoder(item, output, is_in_prefix=is_in_prefix),
        "prefix": is_in_prefix,
        "ms": _as_ms(item.times),
    }


def _describe_encoder(item: MediaItemReport, output: RequestOutput, *, is_in_prefix: bool) -> str:
    """Return how an item got its embeddings.

    It is "skipped" if the prefix cache has all of its tokens, so that no embeddings are needed.
    """
    if is_in_prefix:
        return "skipped"
    return "hit" if item.mm_index in output.encoder_hits else "miss"


def _as_ms(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return times in milliseconds, in the order of the stages."""
    named = [stage for stage in STAGES if stage in seconds]
    named += [stage for stage in seconds if stage not in STAGES]
    return {stage: _round(seconds[stage]) for stage in named}


def _round(seconds: float) -> float:
    return round(1000 * seconds, 3)
