"""When a session ends by itself, by a clock that the test turns."""

from __future__ import annotations

from sensorium.server.http.realtime.connection import EXPIRED, IDLE, Deadlines


def test_a_client_that_is_silent_for_an_hour_is_idle_long_before() -> None:
    deadlines = Deadlines(idle_s=300.0, max_s=21_600.0, began=1000.0)
    now, num_looks = 1000.0, 0
    while (ending := deadlines.find_ending(now)) is None:
        pause_s = deadlines.get_pause(now)
        assert pause_s is not None
        assert pause_s > 0  # otherwise the guard would spin
        now += pause_s
        num_looks += 1
    assert (ending, now, num_looks) == (IDLE, 1300.0, 1)


def test_a_session_that_is_used_lasts_to_its_end() -> None:
    deadlines = Deadlines(idle_s=300.0, max_s=3600.0, began=0.0)
    now = 0.0
    for second in range(0, 3600, 10):  # the client sends something every ten seconds
        now = float(second)
        deadlines.touched = now
        assert deadlines.find_ending(now) is None
    assert deadlines.get_pause(now) == 10.0
    assert deadlines.find_ending(3600.0) is EXPIRED


def test_a_client_that_waits_for_the_server_is_not_idle() -> None:
    deadlines = Deadlines(idle_s=5.0, max_s=0.0, began=0.0)
    deadlines.num_busy = 1
    assert deadlines.find_ending(1e6) is None
    assert deadlines.get_pause(1e6) == 5.0
    deadlines.num_busy, deadlines.touched = 0, 1e6
    assert deadlines.find_ending(1e6 + 4.9) is None
    assert deadlines.find_ending(1e6 + 5.0) is IDLE


def test_limits_can_be_turned_off() -> None:
    deadlines = Deadlines(idle_s=0.0, max_s=0.0, began=0.0)
    assert deadlines.find_ending(1e9) is None
    assert deadlines.get_pause(1e9) is None
