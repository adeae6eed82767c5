"""The order in which jobs of the pool are taken, and when they are refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.multimodal.pool.jobs import SHORT_S, JobQueue, PoolJob
from sensorium.types.errors import CapacityError

LONG_S = 30.0


def make_job(name: str = "", *, cost_s: float | None = 0.0, **options: Any) -> PoolJob:
    options = {"wait_s": 600.0, "deadline_s": 600.0, **options}
    return PoolJob(job=name.encode(), blocks=(), cost_s=cost_s, on_reply=bool, **options)


def take(queue: JobQueue, worker: object) -> str | None:
    job = queue.take_job(worker, 0.0)
    return None if job is None else job.job.decode()


def test_jobs_of_one_cost_come_in_order() -> None:
    queue = JobQueue(8)
    for name in "abc":
        queue.add(make_job(name))
    assert [take(queue, 1) for _ in range(4)] == ["a", "b", "c", None]


def test_a_short_job_passes_a_long_one_that_came_before() -> None:
    queue = JobQueue(8)
    queue.add(make_job("long", cost_s=LONG_S))
    queue.add(make_job("unknown", cost_s=None))
    queue.add(make_job("short"))
    assert [take(queue, 1) for _ in range(3)] == ["unknown", "short", "long"]


def test_a_long_job_is_not_passed_for_ever() -> None:
    now = time.monotonic()
    queue = JobQueue(8)
    queue.add(make_job("long", cost_s=10_000.0, submitted=now - 11.0))
    queue.add(make_job("older short", submitted=now - 2.0))
    queue.add(make_job("newer short", submitted=now))
    assert [take(queue, 1) for _ in range(3)] == ["older short", "long", "newer short"]


def test_one_worker_of_several_runs_no_long_job() -> None:
    queue = JobQueue(16, num_workers=3)
    for name in "abc":
        queue.add(make_job(name, cost_s=LONG_S))
    assert [take(queue, worker) for worker in range(3)] == ["a", "b", None]
    queue.add(make_job("short"))
    assert take(queue, 2) == "short"
    queue.release(2)
    assert take(queue, 2) is None
    queue.release(0)
    assert take(queue, 2) == "c"


def test_a_single_worker_also_runs_long_jobs() -> None:
    queue = JobQueue(8, num_workers=1)
    queue.add(make_job("long", cost_s=LONG_S))
    assert take(queue, 1) == "long"
    assert queue.max_unknown_cost_s > 10**6  # and is not asked to give jobs back
    assert JobQueue(8, num_workers=2).max_unknown_cost_s == SHORT_S


def test_a_job_that_turns_out_to_be_long_waits_as_a_long_one() -> None:
    queue = JobQueue(8, num_workers=2)
    first, second = make_job("first", cost_s=None), make_job("second", cost_s=None)
    for worker, job in enumerate((first, second)):
        queue.add(job)
        assert take(queue, worker) is not None
        queue.add_as_long(job, LONG_S)
        queue.release(worker)
    assert take(queue, 0) == "first"
    assert take(queue, 1) is None
    queue.release(0)
    assert take(queue, 1) == "second"


def test_long_jobs_fill_a_quarter_of_the_queue_at_most() -> None:
    queue = JobQueue(8)
    for _ in range(2):
        queue.add(make_job(cost_s=LONG_S))
    with pytest.raises(CapacityError, match="too many"):
        queue.add(make_job(cost_s=LONG_S, wait_s=0.01))
    late = make_job("late", cost_s=None)
    queue.add(late)
    assert take(queue, 1) == "late"
    queue.add_as_long(late, LONG_S)
    with pytest.raises(CapacityError, match="too many long media items"):
        late.future.result(0)
    queue.add(make_job("short"))
    assert take(queue, 1) == "short"


def test_a_job_that_waits_too_long_is_a_capacity_error_whatever_it_went_through() -> None:
    queue = JobQueue(8)
    jobs = [make_job(wait_s=0.01), make_job(wait_s=0.01, num_lost=1)]
    for job in jobs:
        queue.add(job)
    time.sleep(0.02)
    queue.drop_expired()
    for job in jobs:
        with pytest.raises(CapacityError, match=r"no process was free .* within 0.01 seconds"):
            job.future.result(0)
    assert len(queue) == 0


def test_a_job_that_is_put_back_may_wait_again_from_the_start() -> None:
    queue = JobQueue(8)
    job = make_job("again", wait_s=600.0)
    queue.add(job)
    assert take(queue, 1) == "again"
    job.waits_until = 0.0
    queue.add_again(job)
    assert take(queue, 1) == "again"


def test_a_refusal_says_when_to_try_again() -> None:
    queue = JobQueue(8)
    waiting = make_job()
    queue.add(waiting)
    queue.refuse("no worker starts", 30.0)
    for error in (waiting.future.exception(0), queue.get_refusal()):
        assert isinstance(error, CapacityError)
        assert str(error) == "no worker starts"
        assert 1 <= error.retry_after_s <= 30
    with pytest.raises(CapacityError, match="no worker starts"):
        queue.add(make_job())
    queue.refuse("it is over", 0.0)
    queue.add(make_job("later"))
    assert take(queue, 1) == "later"


@given(
    costs=st.lists(st.sampled_from([None, 0.0, 0.1, LONG_S]), max_size=12),
    num_workers=st.integers(2, 4),
    choices=st.lists(st.integers(0, 3), min_size=1, max_size=60),
)
def test_whatever_happens_one_worker_is_left_to_short_jobs_and_no_job_is_lost(
    costs: list[float | None], num_workers: int, choices: list[int]
) -> None:
    queue = JobQueue(64, num_workers=num_workers)
    jobs = [make_job(str(index), cost_s=cost_s) for index, cost_s in enumerate(costs)]
    for job in jobs:
        queue.add(job)
    running: dict[int, PoolJob] = {}
    pending = iter([*choices, *range(num_workers)] * (len(jobs) + 1) * 3)
    for choice in pending:
        worker = choice % num_workers
        if worker in running:
            job = running.pop(worker)
            if job.cost_s is None and int(job.job) % 2:
                queue.add_as_long(job, LONG_S)
            else:
                job.finish(True)
            queue.release(worker)
        elif (taken := queue.take_job(worker, 0.0)) is not None:
            running[worker] = taken
        assert sum(job.is_long for job in running.values()) < num_workers
    for job in running.values():
        job.finish(True)
    assert all(job.future.done() for job in jobs)
