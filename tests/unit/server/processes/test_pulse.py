"""A parent distinguishes a slow core from one that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from sensorium.server.processes.shared_resources import (
    Pulse,
    Sign,
    StallWatch,
    Verdict,
    get_idle_interval,
    get_look_interval,
)

LIMIT_S = 60.0


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    with closing(Pulse.create()) as pulse:
        yield pulse


class Looks:
    """Looks of a parent, each one second after the one before."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._watch = StallWatch(LIMIT_S)

    def look(self, beat: float, *, seconds: float = 1.0, is_long_work: bool = False) -> Verdict:
        self.now += seconds
        return self._watch.look(self.now, Sign(beat=beat, is_long_work=is_long_work))

    def look_often(self, num_looks: int, beat: float) -> list[Verdict]:
        return [self.look(beat) for _ in range(num_looks)]


def test_silence_is_a_stall_after_the_limit_and_a_loss_after_twice_that() -> None:
    looks = Looks()
    verdicts = looks.look_often(130, beat=5.0)
    assert (verdicts.index("stalled"), verdicts.index("lost")) == (60, 120)
    assert set(verdicts[120:]) == {"lost"}


def test_a_core_that_moves_again_is_stalled_no_more() -> None:
    looks = Looks()
    assert looks.look_often(70, beat=5.0)[-1] == "stalled"
    assert looks.look(beat=6.0) == "moves"
    assert set(looks.look_often(59, beat=6.0)) == {"moves"}


def test_a_step_of_an_hour_that_makes_progress_is_no_stall() -> None:
    looks = Looks()
    assert {looks.look(beat=float(1 + number // 30)) for number in range(3600)} == {"moves"}


def test_work_that_was_announced_as_long_is_no_stall() -> None:
    looks = Looks()
    assert {looks.look(beat=5.0, is_long_work=True) for _ in range(3600)} == {"moves"}
    verdicts = looks.look_often(61, beat=5.0)
    assert verdicts.index("stalled") == 59


def test_a_core_that_has_not_begun_to_beat_is_not_judged() -> None:
    assert set(Looks().look_often(3600, beat=0.0)) == {"moves"}


def test_time_in_which_the_parent_itself_was_held_up_does_not_count() -> None:
    looks = Looks()
    looks.look_often(30, beat=5.0)
    assert looks.look(beat=5.0, seconds=3600.0) == "moves"
    assert looks.look(beat=6.0) == "moves"


def test_an_idle_core_beats_more_often_than_its_parent_grows_impatient() -> None:
    for limit_s in (0.1, 1.0, 60.0, 86_400.0):
        assert get_look_interval(limit_s) + get_idle_interval(limit_s) < limit_s
        assert get_look_interval(limit_s) <= 1.0
        assert get_idle_interval(limit_s) <= 1.0


def test_another_process_writes_and_its_memory_is_reserved(pulse: Pulse) -> None:
    assert pulse.read() == Sign(beat=0.0, is_long_work=False)
    assert os.fstat(pulse.fd).st_blocks > 0
    script = (
        "import sys\nfrom sensorium.server.processes.shared_resources import Pulse\n"
        "pulse = Pulse.attach(int(sys.argv[1]))\npulse.note_long_work(True)\n"
    )
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", script, str(pulse.fd)], pass_fds=(pulse.fd,), check=True, timeout=120
    )
    sign = pulse.read()
    assert began <= sign.beat <= time.monotonic()
    assert sign.is_long_work
    pulse.clear()
    assert pulse.read() == Sign(beat=0.0, is_long_work=False)
