"""When a service that has failed is asked again, and what is logged about that."""

from __future__ import annotations

import logging

import pytest

from sensorium.multimodal.tiers import breaker
from sensorium.multimodal.tiers.breaker import Breaker


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(breaker.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make_breaker() -> Breaker:
    return Breaker("the cache at 100%s", failed="fails", advice="Go on.", back="is back")


def fail(tested: Breaker, reason: str = "it is gone") -> None:
    token = tested.enter(1.0)
    assert token is not None
    tested.note_failure(token, reason)


def test_pauses_become_longer_up_to_a_limit_until_a_success(clock: Clock) -> None:
    tested = make_breaker()
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        fail(tested)
        clock.now += pause_s - 0.01
        assert tested.is_waiting
        assert tested.enter(1.0) is None
        clock.now += 0.02
        assert not tested.is_waiting
    token = tested.enter(1.0)
    assert token is not None
    tested.note_success(token)
    fail(tested)
    clock.now += 1.01
    assert tested.enter(1.0) is not None, "the first pause is short again"


def test_after_a_pause_one_call_tries_and_the_others_wait(clock: Clock) -> None:
    tested = make_breaker()
    fail(tested)
    clock.now += 1.01
    token = tested.enter(5.0)
    assert token is not None
    assert tested.enter(5.0) is None
    clock.now += 5.01
    assert tested.enter(5.0) is not None, "the call that tried was never reported"
    tested.note_success(token)
    assert [tested.enter(5.0) for _ in range(3)] == [token] * 3


def test_calls_that_were_under_way_count_as_one_failure(clock: Clock) -> None:
    tested = make_breaker()
    tokens = [tested.enter(1.0) for _ in range(5)]
    late = tested.enter(1.0)
    for token in tokens:
        assert token is not None
        tested.note_failure(token, "it is gone")
    assert late is not None
    tested.note_success(late)  # it began before the failure
    assert tested.enter(1.0) is None
    clock.now += 1.01
    assert tested.enter(1.0) is not None, "the pause is that of one failure"


def test_one_line_when_it_fails_and_one_when_it_is_back(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tested = make_breaker()
    for number in range(3):
        fail(tested, f"reason {number}")
        clock.now += 100
    for _ in range(3):
        token = tested.enter(1.0)
        assert token is not None
        tested.note_success(token)
    assert caplog.messages == [
        "the cache at 100%s fails: reason 0. Go on.",
        "the cache at 100%s is back",
    ]
