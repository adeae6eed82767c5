"""From the arrival of a request to what is counted of it."""

from __future__ import annotations

import pytest

from sensorium.server.metrics.clock import RequestClock
from sensorium.server.metrics.metric_set import MetricSet
from sensorium.server.metrics.shared_files import Values
from sensorium.speech.transcript import SpeechUsage
from sensorium.types.outputs import MediaItemReport
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams
from tests.unit.server.metrics.outputs import ARRIVED, make_output


class Time:
    def __init__(self) -> None:
        self.now = ARRIVED

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def metrics() -> MetricSet:
    return MetricSet("tiny")


def make_clock(metrics: MetricSet, time: Time, *, n: int = 1) -> RequestClock:
    params = SamplingParams(n=n, max_tokens=7)
    return RequestClock(metrics, arrived=ARRIVED, params=params, clock=time)


def read(metrics: MetricSet) -> Values:
    return Values(metrics.registry)


def get_sum(metrics: MetricSet, name: str, **labels: str) -> tuple[float, float]:
    """Return how often it was observed, and the sum."""
    values = read(metrics)
    return values.get(f"{name}_count", **labels), values.get(f"{name}_sum", **labels)


def test_times_between_tokens_are_those_of_a_completion(metrics: MetricSet, time: Time) -> None:
    clock = make_clock(metrics, time, n=2)
    for now, index in ((105.0, 0), (106.0, 1), (106.5, 0), (108.0, 1)):
        time.now = now
        clock.on_tokens(index, 1)
    assert get_sum(metrics, "vllm:time_to_first_token_seconds") == (1, 5.0)
    assert get_sum(metrics, "vllm:inter_token_latency_seconds") == (2, 3.5)
    assert read(metrics).get("vllm:generation_tokens_total") == 4


def test_the_end_counts_what_was_not_counted_as_it_came(metrics: MetricSet, time: Time) -> None:
    clock = make_clock(metrics, time, n=2)
    clock.on_tokens(0, 2)
    time.now = 110.0
    clock.on_finish(make_output(5, 3, reasons=(FinishReason.STOP, FinishReason.LENGTH)))
    values = read(metrics)
    assert values.get("vllm:generation_tokens_total") == 8
    assert values.get("vllm:request_success_total", finished_reason="stop") == 1
    assert values.get("vllm:request_success_total", finished_reason="length") == 1
    assert get_sum(metrics, "vllm:request_generation_tokens") == (2, 8)
    assert get_sum(metrics, "vllm:request_max_num_generation_tokens") == (1, 5)
    assert get_sum(metrics, "vllm:request_prompt_tokens") == (1, 10)
    assert get_sum(metrics, "vllm:request_prefill_kv_computed_tokens") == (1, 6)
    assert get_sum(metrics, "vllm:request_params_n") == (1, 2)
    assert get_sum(metrics, "vllm:request_params_max_tokens") == (1, 7)
    assert get_sum(metrics, "vllm:e2e_request_latency_seconds") == (1, 10.0)


def test_latencies_in_the_core_are_taken_from_its_times(metrics: MetricSet, time: Time) -> None:
    clock = make_clock(metrics, time)
    clock.on_finish(make_output(4))
    assert get_sum(metrics, "vllm:request_queue_time_seconds") == (1, 1.0)
    assert get_sum(metrics, "vllm:request_prefill_time_seconds") == (1, 2.0)
    assert get_sum(metrics, "vllm:request_decode_time_seconds") == (1, 3.0)
    assert get_sum(metrics, "vllm:request_inference_time_seconds") == (1, 5.0)
    assert get_sum(metrics, "vllm:request_time_per_output_token_seconds") == (1, 1.0)
    # No single token was reported: the core's time of the first one is as good.
    assert get_sum(metrics, "vllm:time_to_first_token_seconds") == (1, 5.0)


def test_one_token_takes_no_time_after_the_first(metrics: MetricSet, time: Time) -> None:
    make_clock(metrics, time).on_finish(make_output(1))
    assert get_sum(metrics, "vllm:request_time_per_output_token_seconds") == (1, 0.0)


def test_stages_are_those_of_the_request_and_its_items(metrics: MetricSet, time: Time) -> None:
    clock = make_clock(metrics, time)
    time.now = 100.25
    clock.mark("parse")
    items = tuple(
        MediaItemReport(
            modality="image",
            mm_hash=name,
            is_processor_hit=False,
            transfer="tensors",
            times={"fetch": 0.5, "decode": 0.25},
        )
        for name in ("cat", "dog")
    )
    clock.on_finish(make_output(4, mm_items=items))
    stages = {
        "parse": (1, 0.25),
        "wait_thread": (1, 0.125),
        "render": (1, 0.25),
        "perceive": (1, 1.0),
        "fetch": (2, 1.0),
        "decode": (2, 0.5),
        "hash": (0, 0),
        "transfer": (1, 0.5),
        "queue": (1, 1.0),
        "encode": (1, 0.75),
        "prefill": (1, 2.0),
        "generate": (1, 3.0),
    }
    for stage, expected in stages.items():
        assert get_sum(metrics, "sensorium:stage_seconds", stage=stage) == expected


def test_a_client_that_left_is_an_abort_of_all_its_completions(
    metrics: MetricSet, time: Time
) -> None:
    clock = make_clock(metrics, time, n=3)
    clock.on_tokens(0, 2)
    clock.on_end(FinishReason.ABORT)
    clock.on_end(FinishReason.ERROR)
    clock.on_finish(make_output(5, 5, 5))
    values = read(metrics)
    assert values.get("vllm:request_success_total") == 3
    assert values.get("vllm:request_success_total", finished_reason="abort") == 3
    assert values.get("vllm:generation_tokens_total") == 2
    assert values.get("vllm:e2e_request_latency_seconds_count") == 0


def test_a_transcript_is_one_request_with_the_tokens_of_all_its_windows(
    metrics: MetricSet, time: Time
) -> None:
    clock = make_clock(metrics, time)
    clock.mark("parse")
    for time.now in (ARRIVED + 2.0, ARRIVED + 5.0):
        clock.on_segment()
    clock.on_transcript(SpeechUsage(num_text_tokens=4, num_audio_tokens=150, num_output_tokens=9))
    clock.on_end(FinishReason.ABORT)  # the generator is closed after its last part
    values = read(metrics)
    assert values.get("vllm:request_success_total", finished_reason="stop") == 1
    assert values.get("vllm:request_success_total", finished_reason="abort") == 0
    assert values.get("vllm:generation_tokens_total") == 9
    assert get_sum(metrics, "vllm:time_to_first_token_seconds") == (1, 2.0)
    assert get_sum(metrics, "vllm:e2e_request_latency_seconds") == (1, 5.0)
    assert get_sum(metrics, "vllm:request_prompt_tokens") == (1, 154)
    assert get_sum(metrics, "vllm:request_generation_tokens") == (1, 9)
    assert get_sum(metrics, "sensorium:stage_seconds", stage="parse") == (1, 0.0)
    assert get_sum(metrics, "vllm:request_decode_time_seconds") == (0, 0)


def test_a_failure_is_counted_and_measures_nothing(metrics: MetricSet, time: Time) -> None:
    reasons = (FinishReason.ERROR, FinishReason.ABORT)
    make_clock(metrics, time, n=2).on_finish(make_output(2, 0, reasons=reasons))
    values = read(metrics)
    assert values.get("vllm:request_success_total", finished_reason="error") == 1
    assert values.get("vllm:request_success_total", finished_reason="abort") == 1
    assert values.get("vllm:request_prompt_tokens_count") == 0
    assert values.get("vllm:request_queue_time_seconds_count") == 0


def test_an_end_without_times_is_counted(metrics: MetricSet, time: Time) -> None:
    make_clock(metrics, time).on_finish(make_output(2, times=None))
    values = read(metrics)
    assert values.get("vllm:e2e_request_latency_seconds_count") == 1
    assert values.get("vllm:request_queue_time_seconds_count") == 0
    assert values.get("sensorium:stage_seconds_count", stage="transfer") == 0


def test_a_stage_that_is_marked_twice_adds_up(metrics: MetricSet, time: Time) -> None:
    clock = make_clock(metrics, time)
    for _ in range(2):
        time.now += 0.5
        clock.mark("parse")
    assert clock.stages == {"parse": 1.0}
    assert clock.elapsed_s == 1.0
