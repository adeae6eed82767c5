"""The line that the parent logs every few seconds while there is something to do.

Rates are those of the time since the last look: tokens per second, and the shares of what was
looked up in that time. Nothing looked up: no share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sensorium.server.metrics.collect import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the line needs. The first four are of the moment, the others since the start."""

    num_running: float = 0
    num_waiting: float = 0
    num_preparing: float = 0
    kv_cache_usage: float = 0
    num_prompt_tokens: float = 0
    num_generation_tokens: float = 0
    num_finished: float = 0
    num_prefix_queries: float = 0
    num_prefix_hits: float = 0
    num_mm_queries: float = 0
    num_mm_hits: float = 0


def take_snapshot(values: Values) -> Snapshot:
    return Snapshot(
        num_running=values.get("vllm:num_requests_running"),
        num_waiting=values.get("vllm:num_requests_waiting"),
        num_preparing=values.get("sensorium:num_requests_preparing"),
        kv_cache_usage=values.get("vllm:kv_cache_usage_perc"),
        num_prompt_tokens=values.get("vllm:prompt_tokens_total"),
        num_generation_tokens=values.get("vllm:generation_tokens_total"),
        num_finished=values.get("vllm:request_success_total"),
        num_prefix_queries=values.get("vllm:prefix_cache_queries_total"),
        num_prefix_hits=values.get("vllm:prefix_cache_hits_total"),
        num_mm_queries=values.get("vllm:mm_cache_queries_total"),
        num_mm_hits=values.get("vllm:mm_cache_hits_total"),
    )


def format_line(last: Snapshot, now: Snapshot, *, seconds: float) -> str | None:
    """`None`: nothing is under way, and nothing happened between the two."""
    num_open = now.num_running + now.num_waiting + now.num_preparing
    if not num_open and _get_totals(last) == _get_totals(now):
        return None
    prompt_rate = (now.num_prompt_tokens - last.num_prompt_tokens) / seconds
    generation_rate = (now.num_generation_tokens - last.num_generation_tokens) / seconds
    prefix = _format_share(
        now.num_prefix_hits - last.num_prefix_hits, now.num_prefix_queries - last.num_prefix_queries
    )
    media = _format_share(
        now.num_mm_hits - last.num_mm_hits, now.num_mm_queries - last.num_mm_queries
    )
    return (
        f"Running: {now.num_running:.0f}, waiting: {now.num_waiting:.0f}, "
        f"preparing: {now.num_preparing:.0f} | prompt {prompt_rate:.1f} tok/s, "
        f"generation {generation_rate:.1f} tok/s | KV cache {now.kv_cache_usage:.1%} | "
        f"Prefix cache hit rate: {prefix} | MM cache hit rate: {media}"
    )


def _get_totals(snapshot: Snapshot) -> tuple[float, ...]:
    return (
        snapshot.num_prompt_tokens,
        snapshot.num_generation_tokens,
        snapshot.num_finished,
        snapshot.num_prefix_queries,
        snapshot.num_mm_queries,
    )


def _format_share(num_hits: float, num_queries: float) -> str:
    return f"{num_hits / num_queries:.1%}" if num_queries > 0 else "n/a"


class LogLine:
    """`read` gives the values of now, `started` is a time of the clock that `take` is told."""

    def __init__(self, read: Callable[[], Values], *, started: float) -> None:
        self._read = read
        self._last = Snapshot()
        self._taken = started

    def take(self, now: float) -> str | None:
        """The line for the time since the last call, if something happened in it."""
        last, self._last = self._last, take_snapshot(self._read())
        seconds, self._taken = now - self._taken, now
        return format_line(last, self._last, seconds=max(seconds, 1e-3))
