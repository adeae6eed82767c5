"""Silence of a client adds up; a byte that it takes, or a loop that was held up, ends it."""

from __future__ import annotations

from sensorium.server.http.wire.progress import UnreadWatch

TIMEOUT_S = 60.0


def make_watch() -> UnreadWatch:
    return UnreadWatch(TIMEOUT_S, num_bytes=1000, now=0.0)


def look_until_over(watch: UnreadWatch, num_bytes: int, *, begin: float = 0.0) -> float:
    """Look as often as the watch wants; return the time at which it has enough."""
    now = begin
    for _ in range(100):
        now += watch.interval_s
        if watch.look(now, num_bytes):
            return now
    raise AssertionError("it never has enough")


def test_a_client_that_reads_nothing_for_the_whole_timeout_is_closed() -> None:
    assert look_until_over(make_watch(), 1000) == TIMEOUT_S


def test_one_read_byte_restarts_the_timeout() -> None:
    watch = make_watch()
    assert not watch.look(7.5, 1000)
    assert not watch.look(15.0, 999)
    assert look_until_over(watch, 999, begin=15.0) == 15.0 + TIMEOUT_S


def test_a_buffer_that_grows_is_no_sign_of_life() -> None:
    watch = make_watch()
    sizes = [(7.5 * (number + 1), 1000 + number) for number in range(8)]
    assert [watch.look(now, size) for now, size in sizes] == [False] * 7 + [True]


def test_time_in_which_the_loop_itself_was_held_up_does_not_count() -> None:
    watch = make_watch()
    assert not watch.look(3600.0, 1000)
    assert not watch.look(3607.5, 1000)
