"""Jobs of the pool, and the bounded queue in which they wait for a worker.

Invariants:
  1. The future of every job that was accepted is settled, once.
  2. A job that was cancelled before a worker took it is never run.
  3. Futures are settled outside the lock, since others' callbacks run then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sensorium.multimodal.pool.channel import Buffer
from sensorium.types.errors import CapacityError, ModelError, RequestError
from sensorium.types.multimodal import MultiModalKwargsItem

_CLOSED = "media can't be processed: the server is stopping"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolReply:
    """What a handler gave. The tensors are views of memory of their own, writable."""

    reply: bytes
    kwargs: MultiModalKwargsItem


@dataclass(slots=True, kw_only=True, eq=False)
class PoolJob:
    """`deadline` is a time of `time.monotonic`. `future` gets the result of `on_reply`."""

    job: bytes
    blocks: Sequence[Buffer]
    deadline: float
    on_reply: Callable[[PoolReply], Any]
    future: Future[Any] = field(default_factory=Future)
    num_tries: int = 0

    def cancel(self) -> bool:
        """A job that waits never runs; of one that runs the result is dropped. False: too late."""
        return self.future.cancel()

    def finish(self, result: Any) -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            self.future.set_exception(error)


class JobQueue:
    """Safe to use from several threads."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._jobs: deque[PoolJob] = deque()
        self._refusal: tuple[str, float] | None = None  # a reason, and until when it holds
        self.is_closed = False
        self.num_done = 0
        self.num_failed = 0
        self.num_cancelled = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: PoolJob) -> None:
        """Waits for room, until the job's deadline."""
        job.future.add_done_callback(self._forget)
        with self._changed:
            while True:
                self._check_open()
                if len(self._jobs) < self._max_queued:
                    break
                remaining = job.deadline - time.monotonic()
                if remaining <= 0.0:
                    raise CapacityError("too many media items wait to be processed")
                self._changed.wait(min(remaining, 1.0))
            self._jobs.append(job)
            self._changed.notify_all()

    def add_first(self, job: PoolJob) -> None:
        """A job that was taken and must be run again."""
        with self._changed:
            if not job.future.done():
                self._jobs.appendleft(job)
                self._changed.notify_all()

    def take_job(self, timeout_s: float) -> PoolJob | None:
        """The next job, if one comes within that time."""
        self.drop_expired()
        with self._changed:
            if not self._jobs and not self.is_closed:
                self._changed.wait(timeout_s)
            while self._jobs and not self.is_closed:
                job = self._jobs.popleft()
                self._changed.notify_all()
                if not job.future.done():
                    return job
            return None

    def drop_expired(self) -> None:
        now = time.monotonic()
        with self._changed:
            expired = [job for job in self._jobs if job.deadline <= now]
        for job in expired:
            job.fail(
                RequestError("it could not be processed in time")
                if job.num_tries
                else CapacityError("no time was left to process it: too many media items wait")
            )

    def refuse(self, reason: str, duration_s: float) -> None:
        """No worker can be started: fail what waits, and what comes in that time."""
        with self._changed:
            self._refusal = reason, time.monotonic() + duration_s
        self._fail_all(lambda: ModelError(reason))

    def get_refusal(self) -> str | None:
        refusal = self._refusal
        return refusal[0] if refusal is not None and time.monotonic() < refusal[1] else None

    @property
    def was_refused(self) -> bool:
        """Whether workers could not be started, once."""
        return self._refusal is not None

    def wait_until_closed(self, timeout_s: float) -> None:
        with self._changed:
            if not self.is_closed:
                self._changed.wait(timeout_s)

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        self._fail_all(lambda: CapacityError(_CLOSED))

    def _check_open(self) -> None:
        if self.is_closed:
            raise CapacityError(_CLOSED)
        reason = self.get_refusal()
        if reason is not None:
            raise ModelError(reason)

    def _fail_all(self, make_error: Callable[[], Exception]) -> None:
        with self._changed:
            jobs = list(self._jobs)
        for job in jobs:
            job.fail(make_error())

    def _forget(self, future: Future[Any]) -> None:
        """It is settled, by whomever. Knows the job by its future: a callback that held the job
        would keep its result alive until the garbage collector comes.
        """
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
