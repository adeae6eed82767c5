"""Patience with processes that die: pauses, and their end."""

from __future__ import annotations

from sensorium.server.processes.supervisor import RestartPolicy

MAX_TRIES, SETTLED_S = RestartPolicy().max_tries, RestartPolicy().settled_s


def test_pauses_double_from_half_a_second() -> None:
    policy = RestartPolicy()
    assert [policy.note_end(lived_s=1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_after_five_tries_in_a_row_restarts_stop() -> None:
    policy = RestartPolicy()
    pauses = [policy.note_end(lived_s=0.0) for _ in range(MAX_TRIES + 1)]
    assert None not in pauses[:MAX_TRIES]
    assert pauses[MAX_TRIES] is None


def test_a_long_life_makes_the_next_end_the_first_again() -> None:
    policy = RestartPolicy()
    for _ in range(MAX_TRIES):
        policy.note_end(lived_s=SETTLED_S - 0.1)
    assert policy.note_end(lived_s=SETTLED_S) == 0.5
    assert policy.note_end(lived_s=0.0) == 1.0


def test_pauses_stay_below_half_a_minute() -> None:
    policy = RestartPolicy(max_tries=100)
    pauses = [policy.note_end(lived_s=0.0) for _ in range(100)]
    assert pauses[-1] == max(filter(None, pauses)) == 30.0
