"""Jobs of the pool, and the bounded queue in which they wait for a worker.

Short jobs overtake long ones: jobs are ordered by the time of their submission plus the seconds
that they are estimated to take, ten at most. So no job overtakes one that was submitted more than
ten seconds before it. Long jobs never occupy all workers of a pool that has several: one worker
remains for short jobs.

Invariants:
  1. The future of every job that was accepted is settled, once.
  2. A job that was cancelled before a worker took it is never run.
  3. Futures are settled outside the lock, because that runs callbacks of other modules.
  4. Of several workers, one at least runs no long job.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sensorium.multimodal.pool.channel import Buffer
from sensorium.types.errors import CapacityError, StoppingError
from sensorium.types.multimodal import MultiModalKwargsItem

SHORT_S = 0.5  # a job that is estimated to take more is a long one
_MAX_LAG_S = 10.0  # seconds by which the longest job is set back in the order
_MAX_LONG_SHARE = 4  # a quarter of the queue may be long jobs
CLOSED = "media can't be processed: the server is stopping"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolReply:
    """The result of a job: the handler's reply and tensors, which are writable and not shared."""

    reply: bytes
    kwargs: MultiModalKwargsItem


@dataclass(slots=True, kw_only=True, eq=False)
class PoolJob:
    """A job of the pool, which the queue and the `Slot` that runs it write to."""

    job: bytes
    blocks: Sequence[Buffer]
    wait_s: float  # how long it may wait for a worker
    deadline_s: float  # how long a worker may take, from the start of its work
    cost_s: float | None  # how long it is estimated to take; None: only the worker can find out
    on_reply: Callable[[PoolReply], Any]
    # Gets the result of `on_reply`. If it is cancelled, the job is dropped, or its result if it
    # runs already.
    future: Future[Any] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    waits_until: float = math.inf  # time of `time.monotonic`, set when the job begins to wait
    num_lost: int = 0  # workers that ended while they worked on it
    num_crashes: int = 0  # those of them that crashed, and were not killed from outside

    @property
    def is_long(self) -> bool:
        return self.cost_s is not None and self.cost_s > SHORT_S

    @property
    def order(self) -> float:
        return self.submitted + min(self.cost_s or 0.0, _MAX_LAG_S)

    def finish(self, result: Any) -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            self.future.set_exception(error)


class JobQueue:
    """A thread-safe, bounded queue of jobs that wait for one of `num_workers` worker processes."""

    def __init__(self, max_queued: int, *, num_workers: int = 1) -> None:
        self._max_queued = max_queued
        self._max_long_queued = max(1, max_queued // _MAX_LONG_SHARE)
        self._max_long_running = max(1, num_workers - 1)
        # The seconds that a job of unknown cost may take. One that takes more is put back as long.
        self.max_unknown_cost_s = SHORT_S if num_workers > 1 else math.inf
        self._changed = threading.Condition()
        self._jobs: list[PoolJob] = []
        self._long_workers: set[object] = set()  # those that run a long job
        self._refusal = ""  # the reason for the latest refusal of jobs
        self._refused_until = 0.0  # of `time.monotonic`
        self.was_refused = False  # there was a time in which workers could not be started
        self.is_closed = False
        self.num_done = 0
        self.num_failed = 0
        self.num_cancelled = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: PoolJob) -> None:
        """Put a job into the queue, and wait for room if the queue is full.

        Raise `CapacityError` if there is no room within the job's `wait_s`, or if jobs are refused
        now, and `StoppingError` if the queue is closed.
        """
        job.waits_until = time.monotonic() + job.wait_s
        job.future.add_done_callback(self._forget)
        with self._changed:
            while True:
                if self.is_closed:
                    raise StoppingError(CLOSED)
                refusal = self.get_refusal()
                if refusal is not None:
                    raise refusal
                if len(self._jobs) < self._max_queued and self._has_room_for(job):
                    break
                remaining = job.waits_until - time.monotonic()
                if remaining <= 0.0:
                    raise CapacityError(
                        "too many media items wait to be processed: try again later"
                    )
                self._changed.wait(min(remaining, 1.0))
            self._jobs.append(job)
            self._changed.notify_all()

    def add_again(self, job: PoolJob) -> None:
        """Put back a job that a worker took and did not finish, unless it was cancelled.

        The job keeps its place in the order, and may again wait for `wait_s` seconds.
        """
        job.waits_until = time.monotonic() + job.wait_s
        with self._changed:
            if not job.future.done():
                self._jobs.append(job)
                self._changed.notify_all()

    def add_as_long(self, job: PoolJob, cost_s: float) -> None:
        """Put back a job that takes about `cost_s`, or fail it if too many long jobs wait."""
        job.cost_s = max(cost_s, SHORT_S * 1.01)
        with self._changed:
            has_room = self._has_room_for(job)
        if has_room:
            self.add_again(job)
        else:
            job.fail(
                CapacityError("too many long media items wait to be processed: try again later")
            )

    def take_job(self, worker: object, timeout_s: float) -> PoolJob | None:
        """Remove the next job from the queue, and record that `worker` runs it, until `release`.

        Return None if no job comes within `timeout_s`, or if the queue is closed.
        """
        self.drop_expired()
        with self._changed:
            job = self._choose()
            if job is None and not self.is_closed:
                self._changed.wait(timeout_s)
                job = self._choose()
            if job is None or self.is_closed:
                return None
            self._jobs.remove(job)
            if job.is_long:
                self._long_workers.add(worker)
            self._changed.notify_all()
            return job

    def release(self, worker: object) -> None:
        """Record that this worker no longer runs the job that it took."""
        with self._changed:
            self._long_workers.discard(worker)
            self._changed.notify_all()

    def drop_expired(self) -> None:
        """Fail the jobs that have waited for a worker longer than they may."""
        now = time.monotonic()
        with self._changed:
            expired = [job for job in self._jobs if job.waits_until <= now]
        for job in expired:
            job.fail(
                CapacityError(
                    f"no process was free to work on the media item within {job.wait_s:g} seconds: "
                    "too many media items wait; try again later"
                )
            )

    def refuse(self, reason: str, duration_s: float) -> None:
        """Fail all waiting jobs, and refuse new ones for `duration_s`, as no worker can start."""
        with self._changed:
            self.was_refused = True
            self._refusal = reason
            self._refused_until = time.monotonic() + duration_s
        retry_after_s = max(1, math.ceil(duration_s))
        self._fail_all(lambda: CapacityError(reason, retry_after_s=retry_after_s))

    def get_refusal(self) -> CapacityError | None:
        """Return the error with which new jobs are refused now, or None if they are accepted."""
        remaining = self._refused_until - time.monotonic()
        if remaining <= 0.0:
            return None
        return CapacityError(self._refusal, retry_after_s=math.ceil(remaining))

    def wait_until_closed(self, timeout_s: float) -> None:
        """Wait until the queue is closed, for at most `timeout_s`; other changes also end this."""
        with self._changed:
            if not self.is_closed:
                self._changed.wait(timeout_s)

    def close(self) -> None:
        """Fail all jobs in the queue, and refuse all new ones from now on."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        self._fail_all(lambda: StoppingError(CLOSED))

    def _choose(self) -> PoolJob | None:
        has_room = len(self._long_workers) < self._max_long_running
        jobs = (job for job in self._jobs if not job.future.done())
        return min(
            (job for job in jobs if has_room or not job.is_long),
            key=lambda job: job.order,
            default=None,
        )

    def _has_room_for(self, job: PoolJob) -> bool:
        num_long = sum(waiting.is_long for waiting in self._jobs)
        return not job.is_long or num_long < self._max_long_queued

    def _fail_all(self, make_error: Callable[[], Exception]) -> None:
        with self._changed:
            jobs = list(self._jobs)
        for job in jobs:
            job.fail(make_error())

    # A callback of the future, without the job: that would keep the result alive until the garbage
    # collector runs.
    def _forget(self, future: Future[Any]) -> None:
        """Remove the job of a future that has ended, and count it as done, failed or cancelled."""
        is_cancelled = future.cancelled()
        if is_cancelled:
            future.set_running_or_notify_cancel()  # or `concurrent.futures.wait` won't see it
        with self._changed:
            for job in [job for job in self._jobs if job.future is future]:
                self._jobs.remove(job)
                self._changed.notify_all()
            if is_cancelled:
                self.num_cancelled += 1
            elif future.exception() is not None:
                self.num_failed += 1
            else:
                self.num_done += 1
