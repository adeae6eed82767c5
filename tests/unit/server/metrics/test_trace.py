"""What an answer says of itself on demand."""

from __future__ import annotations

from sensorium.server.metrics.clock import RequestClock, make_trace
from sensorium.server.metrics.metric_set import MetricSet
from sensorium.types.outputs import MediaItemReport
from sensorium.types.sampling import SamplingParams
from tests.unit.server.metrics.outputs import ARRIVED, make_output


def make_report(name: str, mm_index: int, prompt_end: int, **times: float) -> MediaItemReport:
    return MediaItemReport(
        modality="image",
        mm_hash=name,
        is_processor_hit=not times,
        transfer="tensors" if times else "none",
        times=times,
        mm_index=mm_index,
        prompt_end=prompt_end,
    )


def make_clock(now: float) -> RequestClock:
    params = SamplingParams()
    clock = RequestClock(MetricSet("tiny"), arrived=ARRIVED, params=params, clock=lambda: now)
    clock.mark("parse")
    return clock


def test_the_trace_names_every_stage_in_order_and_sums_those_of_items() -> None:
    items = (
        make_report("cat", 0, 4, fetch=0.5, decode=0.25),
        make_report("dog", 1, 8, fetch=0.125),
    )
    trace = make_trace(make_output(3, mm_items=items), make_clock(108.5))
    assert list(trace["ms"].items()) == [
        ("parse", 8500.0),
        ("wait_thread", 125.0),
        ("render", 250.0),
        ("perceive", 1000.0),
        ("fetch", 625.0),
        ("decode", 250.0),
        ("transfer", 500.0),
        ("queue", 1000.0),
        ("encode", 750.0),
        ("prefill", 2000.0),
        ("generate", 3000.0),
        ("total", 8500.0),
    ]
    assert trace["items"][0]["ms"] == {"fetch": 500.0, "decode": 250.0}
    assert (trace["request_id"], trace["num_prompt_tokens"]) == ("r", 10)


def test_the_trace_names_the_caches_that_served_each_item() -> None:
    """The items come in the order in which they were given; the second stands first."""
    items = (
        make_report("cat", 1, 7, fetch=0.5),
        make_report("dog", 0, 4),
        make_report("fox", 2, 9),
    )
    output = make_output(3, mm_items=items, num_cached_tokens=4, encoder_hits=(2,))
    trace = make_trace(output, make_clock(109.0))
    assert trace["num_cached_tokens"] == 4
    assert trace["items"] == [
        {
            "modality": "image",
            "mm_hash": "cat",
            "processor": "miss",
            "transfer": "tensors",
            "encoder": "miss",
            "prefix": False,
            "ms": {"fetch": 500.0},
        },
        {
            "modality": "image",
            "mm_hash": "dog",
            "processor": "hit",
            "transfer": "none",
            "encoder": "skipped",
            "prefix": True,
            "ms": {},
        },
        {
            "modality": "image",
            "mm_hash": "fox",
            "processor": "hit",
            "transfer": "none",
            "encoder": "hit",
            "prefix": False,
            "ms": {},
        },
    ]


def test_a_text_prompt_has_no_items_in_its_trace() -> None:
    trace = make_trace(make_output(3, times=None), make_clock(109.0))
    assert trace["items"] == []
    assert "queue" not in trace["ms"]
