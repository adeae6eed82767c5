"""Short and long jobs share the pool, with real processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sensorium.multimodal.pool.pool import ProcessPool
from sensorium.types.errors import CapacityError, RequestError
from tests.integration.test_pool import SOON_S, ask, begin, is_running
from tests.support.waiting import wait_until

HANDLER = "tests.integration.pool_handlers:make_servant"
MakePool = Callable[[int], ProcessPool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    pools = []

    def make(size: int) -> ProcessPool:
        pools.append(ProcessPool(size, handler=HANDLER, settings=str(tmp_path).encode()))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_a_long_job_leaves_a_worker_to_short_ones(make_pool: MakePool, tmp_path: Path) -> None:
    """The cost of these jobs is seen only by the workers, which give them back."""
    pool = make_pool(2)
    assert pool.wait_until_ready(SOON_S)
    longs = [pool.submit(f"be_long {name}".encode(), deadline_s=SOON_S) for name in "abc"]
    wait_until(lambda: len(list(tmp_path.glob("costly-*"))) == 3)
    wait_until(lambda: len(list(tmp_path.glob("long-*"))) == 1)
    for number in range(5):
        assert ask(pool, f"double {number}") == str(2 * number)
    assert len(list(tmp_path.glob("long-*"))) == 1
    assert pool.statistics().num_queued == 2
    (tmp_path / "release").touch()
    for job in longs:
        assert job.result(SOON_S).reply == b"release"
    assert pool.statistics().num_restarts == 0


def test_an_only_worker_does_not_give_long_jobs_back(make_pool: MakePool, tmp_path: Path) -> None:
    (tmp_path / "release").touch()
    assert ask(make_pool(1), "be_long a") == "release"
    assert not list(tmp_path.glob("costly-*"))


def test_the_deadline_counts_from_the_start_of_work(make_pool: MakePool, tmp_path: Path) -> None:
    """A job waits for longer than it may work, and is done."""
    pool = make_pool(1)
    blocker = begin(pool, tmp_path, "wait_for release")
    deadline_s = 20.0  # far more than the work needs
    job = pool.submit(b"double 4", deadline_s=deadline_s, wait_s=SOON_S)
    hurried = pool.submit(b"sleep 300", deadline_s=0.5, wait_s=SOON_S)
    time.sleep(1.0)
    assert not hurried.done()  # it has not begun, so its time has not either
    assert not blocker.done()
    (tmp_path / "release").touch()
    assert job.result(SOON_S).reply == b"8"
    with pytest.raises(RequestError, match=r"in time \(limit 0.5 s\)"):
        hurried.result(SOON_S)


def test_a_job_that_waits_too_long_is_refused_for_want_of_capacity(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(1)
    begin(pool, tmp_path, "wait_for release")
    job = pool.submit(b"double 4", deadline_s=SOON_S, wait_s=0.1)
    with pytest.raises(CapacityError, match=r"no process was free .* within 0.1 seconds"):
        job.result(SOON_S)
    (tmp_path / "release").touch()


def test_all_workers_start_together(tmp_path: Path) -> None:
    pool = ProcessPool(3, handler=f"{HANDLER}_when_allowed", settings=str(tmp_path).encode())
    try:
        pool.start()
        wait_until(lambda: len(pool.get_process_ids()) == 3)
        assert pool.is_starting
        (tmp_path / "allowed").touch()
        assert pool.wait_until_ready(SOON_S)
        process_ids = pool.get_process_ids()
        assert len(process_ids) == 3
    finally:
        pool.close()
    assert not any(map(is_running, process_ids))
