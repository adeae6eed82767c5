"""Measures one HTTP request, from its arrival to its end, and makes its `sensorium_trace`.

A request for several completions is one request: its latencies are counted once, with the times of
the first completion in the core, and its completions one by one, each with its reason. Latencies
are recorded only for requests that were answered: all their completions ended by themselves. A
transcript is one request, however many windows of its audio the engine was asked for.

The trace is an object in the answer, on demand, with the request's times and the caches that served
it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sensorium.server.metrics.metric_set import STAGES, MetricSet
from sensorium.types.request import FinishReason

if TYPE_CHECKING:
    from sensorium.speech.transcript import SpeechUsage
    from sensorium.types.outputs import MediaItemReport, RequestOutput
    from sensorium.types.request import CoreTimes
    from sensorium.types.sampling import SamplingParams

_ANSWERED = frozenset((FinishReason.STOP, FinishReason.LENGTH))


class RequestClock:
    """A stopwatch of one HTTP request that writes its latencies and its tokens to the metrics."""

    def __init__(
        self,
        metrics: MetricSet,
        *,
        arrived: float,  # in seconds of `clock`
        params: SamplingParams,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrived = arrived
        self._marked = arrived
        self._params = params
        self._ended: float | None = None
        self._first_token: float | None = None
        self._last_tokens: dict[int, float] = {}  # completion -> time of its last token
        self._num_tokens: Counter[int] = Counter()  # completion -> tokens counted so far
        # stage that was marked in this process -> seconds
        self.stages: defaultdict[str, float] = defaultdict(float)

    @property
    def elapsed_s(self) -> float:
        """Return the seconds from the request's arrival to its end, or to now if it still runs."""
        return (self._clock() if self._ended is None else self._ended) - self._arrived

    def mark(self, stage: str) -> None:
        """Add the time since the last mark, or since the arrival, to a stage that ends now."""
        now = self._clock()
        self.stages[stage] += now - self._marked
        self._marked = now

    def on_tokens(self, index: int, num_tokens: int) -> None:
        """Count new tokens of a completion, and measure TTFT and the time between tokens."""
        if not num_tokens:
            return
        now = self._clock()
        if self._first_token is None:
            self._first_token = now
            self._observe("vllm:time_to_first_token_seconds", now - self._arrived)
        last = self._last_tokens.get(index)
        if last is not None:
            self._observe("vllm:inter_token_latency_seconds", now - last)
        self._last_tokens[index] = now
        self._count_tokens(index, num_tokens)

    def on_finish(self, output: RequestOutput) -> None:
        """Count the end of the request with its final output, unless it has already ended."""
        if self._end():
            return
        for completion in output.outputs:
            num_counted = self._num_tokens[completion.index]
            self._count_tokens(completion.index, len(completion.token_ids) - num_counted)
            self._count_end(completion.finish_reason or FinishReason.ABORT)
        if all(completion.finish_reason in _ANSWERED for completion in output.outputs):
            self._observe_answer(output)
            for stages in _list_stages(output, self):
                self._observe_stages(stages)

    def on_segment(self) -> None:
        """Measure when the first segment of a transcript came: the first text that can be sent."""
        if self._first_token is None:
            self._first_token = self._clock()
            first_s = self._first_token - self._arrived
            self._observe("vllm:time_to_first_token_seconds", first_s)

    def on_transcript(self, usage: SpeechUsage) -> None:
        """Count the end of a transcript as one completion that stopped, unless it ended before.

        Its tokens are those of all windows. Times in the core are of single windows, so they don't
        count.
        """
        if self._end():
            return
        self._count_tokens(0, usage.num_output_tokens)
        self._count_end(FinishReason.STOP)
        self._observe("vllm:e2e_request_latency_seconds", self.elapsed_s)
        num_input_tokens = usage.num_text_tokens + usage.num_audio_tokens
        self._observe("vllm:request_prompt_tokens", num_input_tokens)
        self._observe("vllm:request_generation_tokens", usage.num_output_tokens)
        self._observe("vllm:request_max_num_generation_tokens", usage.num_output_tokens)
        self._observe("vllm:request_params_n", 1)
        self._observe_stages(self.stages)

    def on_end(self, reason: FinishReason) -> None:
        """Count the end of a request that has no final output, unless it has already ended.

        This is for a client that has disconnected, and for a lost engine. Each completion gets
        `reason`.
        """
        if self._end():
            return
        for _ in range(self._params.n):
            self._count_end(reason)

    def _end(self) -> bool:
        """Record when the request ends, and return whether it had already ended."""
        if self._ended is not None:
            return True
        self._ended = self._clock()
        return False

    def _observe_answer(self, output: RequestOutput) -> None:
        lengths = [len(completion.token_ids) for completion in output.outputs]
        num_prompt_tokens = len(output.prompt_token_ids)
        self._observe("vllm:e2e_request_latency_seconds", self.elapsed_s)
        self._observe("vllm:request_prompt_tokens", num_prompt_tokens)
        self._observe(
            "vllm:request_prefill_kv_computed_tokens", num_prompt_tokens - output.num_cached_tokens
        )
        for length in lengths:
            self._observe("vllm:request_generation_tokens", length)
        self._observe("vllm:request_max_num_generation_tokens", max(lengths))
        self._observe("vllm:request_params_n", len(lengths))
        if self._params.max_tokens is not None:
            self._observe("vllm:request_params_max_tokens", self._params.max_tokens)
        if output.times is not None:
            self._observe_times(output.times, num_tokens=lengths[0])

    def _observe_times(self, times: CoreTimes, *, num_tokens: int) -> None:
        if times.scheduled is None or times.first_token is None or times.finished is None:
            return
        if self._first_token is None:  # single tokens were not reported
            first_token_s = times.first_token - self._arrived
            self._observe("vllm:time_to_first_token_seconds", first_token_s)
        decode_s = times.finished - times.first_token
        self._observe("vllm:request_queue_time_seconds", times.scheduled - times.arrived)
        self._observe("vllm:request_prefill_time_seconds", times.first_token - times.scheduled)
        self._observe("vllm:request_decode_time_seconds", decode_s)
        self._observe("vllm:request_inference_time_seconds", times.finished - times.scheduled)
        mean_s = decode_s / (num_tokens - 1) if num_tokens > 1 else 0.0
        self._observe("vllm:request_time_per_output_token_seconds", mean_s)

    def _count_tokens(self, index: int, num_tokens: int) -> None:
        self._num_tokens[index] += num_tokens
        if num_tokens > 0:
            self._metrics.counter("vllm:generation_tokens_total").inc(num_tokens)

    def _count_end(self, reason: FinishReason) -> None:
        self._metrics.counter("vllm:request_success_total", str(reason)).inc()

    def _observe_stages(self, stages: Mapping[str, float]) -> None:
        for stage, seconds in stages.items():
            self._metrics.histogram("sensorium:stage_seconds", stage).observe(seconds)

    def _observe(self, name: str, value: float) -> None:
        self._metrics.histogram(name).observe(value)


def _list_stages(output: RequestOutput, clock: RequestClock) -> list[Mapping[str, float]]:
    """Return maps from stages to seconds: of `clock`, of the engine, and of each media item."""
    stages = dict(output.stages)
    if (times := output.times) is not None:
        if times.scheduled is not None:
            stages["queue"] = times.scheduled - times.arrived
        if times.encode_s:
            stages["encode"] = times.encode_s
        if times.scheduled is not None and times.first_token is not None:
            stages["prefill"] = times.first_token - times.scheduled
        if times.first_token is not None and times.finished is not None:
            stages["generate"] = times.finished - times.first_token
    return [clock.stages, stages, *(item.times for item in output.mm_items)]


def make_trace(output: RequestOutput, clock: RequestClock) -> dict[str, Any]:
    """Return the `sensorium_trace` of a response: its times in milliseconds, and its cache hits.

    The time of a stage of media is the sum over all items. These are processed in parallel, so a
    sum may be longer than `total`. Stages that did not happen are left out.
    """
    seconds: Counter[str] = Counter()
    for stages in _list_stages(output, clock):
        seconds.update(stages)
    return {
        "request_id": output.request_id,
        "ms": _as_ms(seconds) | _as_ms({"total": clock.elapsed_s}),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "items": [_trace_item(item, output) for item in output.mm_items],
    }


def _trace_item(item: MediaItemReport, output: RequestOutput) -> dict[str, Any]:
    is_in_prefix = item.prompt_end is not None and item.prompt_end <= output.num_cached_tokens
    encoder = "hit" if item.mm_index in output.encoder_hits else "miss"
    if item.mm_index in output.encoder_loads:
        encoder = "loaded"
    return {
        "modality": item.modality,
        "mm_hash": item.mm_hash,
        "processor": "hit" if item.is_processor_hit else "miss",
        "transfer": item.transfer,
        # If the prefix cache has all tokens of the item, no embeddings are needed.
        "encoder": "skipped" if is_in_prefix else encoder,
        "prefix": is_in_prefix,
        "ms": _as_ms(item.times),
    }


def _as_ms(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the milliseconds of each stage, in the order of `STAGES`; other names come last."""
    named = [stage for stage in STAGES if stage in seconds]
    named += [stage for stage in seconds if stage not in STAGES]
    return {stage: round(1000 * seconds[stage], 3) for stage in named}
