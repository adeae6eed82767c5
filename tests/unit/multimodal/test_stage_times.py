from __future__ import annotations

from types import SimpleNamespace

import pytest

from sensorium.multimodal.processing.item_worker import StageTimes, add_times


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("sensorium.multimodal.processing.item_worker.time", clock)
    return clock


def test_a_stage_that_is_entered_again_takes_that_much_longer(clock: SimpleNamespace) -> None:
    times = StageTimes()
    for seconds in (1.0, 2.0):
        with times.measure("hash"):
            clock.now += seconds
        clock.now += 10
    times.add({"fetch": 0.5, "hash": 0.25})
    assert times.get() == {"hash": 3.25, "fetch": 0.5}


def test_a_stage_that_failed_has_its_time(clock: SimpleNamespace) -> None:
    times = StageTimes()

    def fail() -> None:
        with times.measure("decode"):
            clock.now += 2
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        fail()
    assert times.get() == {"decode": 2.0}


def test_returned_times_do_not_change_afterwards() -> None:
    times = StageTimes()
    times.add({"fetch": 1.0})
    taken = times.get()
    times.add({"fetch": 1.0})
    assert taken == {"fetch": 1.0}


def test_sums_have_the_stages_of_both() -> None:
    first, second = {"fetch": 1.0, "hash": 2.0}, {"hash": 3.0, "process": 4.0}
    assert add_times(first, second) == {"fetch": 1.0, "hash": 5.0, "process": 4.0}
    assert first == {"fetch": 1.0, "hash": 2.0}
