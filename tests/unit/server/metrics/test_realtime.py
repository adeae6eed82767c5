"""The stopwatch of a live session counts every item once, however it ends."""

from __future__ import annotations

import pytest

from sensorium.server.metrics.metric_set import MetricSet
from sensorium.server.metrics.realtime import SessionClock
from sensorium.speech.live.session import Committed, Failed, TextDelta


@pytest.mark.parametrize("is_committed", [False, True])
def test_an_item_that_fails_is_counted_also_before_its_commit(is_committed: bool) -> None:
    metrics = MetricSet("tiny")
    clock = SessionClock(metrics)
    clock.on_event(TextDelta("item", "some"))
    if is_committed:
        clock.on_event(Committed("item", None))
    clock.on_event(Failed("item", ValueError()))
    clock.end("client")
    ends = {
        reason: metrics.counter("vllm:request_success_total", reason)._value.get()
        for reason in ("error", "abort", "stop")
    }
    assert ends == {"error": 1, "abort": 0, "stop": 0}
