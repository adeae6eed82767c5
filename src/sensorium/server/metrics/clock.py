"""Measures the times and counts of one HTTP request, from its arrival to its end.

A request for several completions is one request. Its latencies are counted once, with the times of
the first completion in the core; its completions are counted one by one, each with its reason. Only
requests that were answered have latencies: those with completions that all ended by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sensorium.server.metrics.metric_set import MetricSet
from sensorium.types.request import FinishReason

if TYPE_CHECKING:
    from sensorium.types.outputs import RequestOutput
    from sensorium.types.request import CoreTimes
    from sensorium.types.sampling import SamplingParams

_ANSWERED = frozenset((FinishReason.STOP, FinishReason.LENGTH))
_SENT = "sent"  # the one entry of `RequestOutput.stages` that is a time, not a duration


class RequestClock:
    """The times and counts of one request.

    `arrived` is a time of `clock`, which is the machine's monotonic one.
    """

    def __init__(
        self,
        metrics: MetricSet,
        *,
        arrived: float,
        params: SamplingParams | None,
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
        self._num_tokens: dict[int, int] = {}  # completion -> tokens counted so far
        self._stages: dict[str, float] = {}

    @property
    def stages(self) -> Mapping[str, float]:
        """Return the stages that were marked or measured in this process: stage -> seconds."""
        return self._stages

    @property
    def elapsed_s(self) -> float:
        """Return the seconds from the arrival to the end, or to now."""
        return (self._clock() if self._ended is None else self._ended) - self._arrived

    def mark(self, stage: str) -> None:
        """Count the time since the last mark, or since the arrival, for this stage."""
        now = self._clock()
        self._add_stage(stage, now - self._marked)
        self._marked = now

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Count the time in this block for a stage."""
        start = self._clock()
        try:
            yield
        finally:
            self._add_stage(stage, self._clock() - start)

    def on_tokens(self, index: int, num_tokens: int) -> None:
        """Count new tokens of one completion."""
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
        """Count the end of the request, good or bad. Later calls count nothing."""
        if self._end():
            return
        reasons = [completion.finish_reason for completion in output.outputs]
        for completion, reason in zip(output.outputs, reasons, strict=True):
            num_counted = self._num_tokens.get(completion.index, 0)
            self._count_tokens(completion.index, len(completion.token_ids) - num_counted)
            self._count_end(reason or FinishReason.ABORT)
        if _ANSWERED.issuperset(reasons):
            self._observe_answer(output)
            self._observe_stages(output)

    def on_end(self, reason: FinishReason) -> None:
        """Count an end without an output: the client left, or the engine was lost."""
        if self._end():
            return
        for _ in range(1 if self._params is None else self._params.n):
            self._count_end(reason)

    def _end(self) -> bool:
        """Note the end, and return whether the request had ended before."""
        if self._ended is not None:
            return True
        self._ended = self._clock()
        return False

    def _observe_answer(self, output: RequestOutput) -> None:
        lengths = [len(completion.token_ids) for completion in output.outputs]
        num_prompt_tokens = len(output.prompt_token_ids)
        self._observe("vllm:e2e_request_latency_seconds", self.elapsed_s)
        self._observe("vllm:request_prompt_tokens", num_prompt_tokens)
        num_computed_tokens = num_prompt_tokens - output.num_cached_tokens
        self._observe("vllm:request_prefill_kv_computed_tokens", num_computed_tokens)
        for length in lengths:
            self._observe("vllm:request_generation_tokens", length)
        self._observe("vllm:request_max_num_generation_tokens", max(lengths))
        self._observe("vllm:request_params_n", len(lengths))
        if self._params is not None and self._params.max_tokens is not None:
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

    def _observe_stages(self, output: RequestOutput) -> None:
        for stage, seconds in self._stages.items():
            self._observe_stage(stage, seconds)
        for stage, seconds in get_request_stages(output).items():
            self._observe_stage(stage, seconds)
        for item in output.mm_items:
            for stage, seconds in item.times.items():
                self._observe_stage(stage, seconds)

    def _add_stage(self, stage: str, seconds: float) -> None:
        self._stages[stage] = self._stages.get(stage, 0.0) + seconds

    def _count_tokens(self, index: int, num_tokens: int) -> None:
        self._num_tokens[index] = self._num_tokens.get(index, 0) + num_tokens
        if num_tokens > 0:
            self._metrics.counter("vllm:generation_tokens_total").inc(num_tokens)

    def _count_end(self, reason: FinishReason) -> None:
        self._metrics.counter("vllm:request_success_total", str(reason)).inc()

    def _observe(self, name: str, value: float) -> None:
        self._metrics.histogram(name).observe(value)

    def _observe_stage(self, stage: str, seconds: float) -> None:
        self._metrics.histogram("sensorium:stage_seconds", stage).observe(seconds)


def get_request_stages(output: RequestOutput) -> dict[str, float]:
    """Return the stages before the core, on the way to it and in it: stage -> seconds."""
    stages = {stage: value for stage, value in output.stages.items() if stage != _SENT}
    times = output.times
    if times is None:
        return stages
    if _SENT in output.stages:
        stages["transfer"] = times.arrived - output.stages[_SENT]
    if times.scheduled is not None:
        stages["queue"] = times.scheduled - times.arrived
    if times.encode_s:
        stages["encode"] = times.encode_s
    if times.scheduled is not None and times.first_token is not None:
        stages["prefill"] = times.first_token - times.scheduled
    if times.first_token is not None and times.finished is not None:
        stages["generate"] = times.finished - times.first_token
    return stages
