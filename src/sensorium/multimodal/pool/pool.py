"""A pool of processes that run one handler, for jobs that hold the interpreter or may crash it.

A job that crashes its worker, or is over its deadline, fails alone: the worker is replaced. Workers
are fresh interpreters (nothing is forked), and nothing that they say is unpickled.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sensorium.multimodal.pool.channel import MAX_FRAME_BYTES, Buffer
from sensorium.multimodal.pool.jobs import JobQueue, PoolJob, PoolReply
from sensorium.multimodal.pool.slot import Slot, WorkerSettings
from sensorium.types.errors import InvariantError

_MAX_JOB_BYTES = MAX_FRAME_BYTES - 1024
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """`num_workers`, `num_queued`, `num_running` are of now, the others since the start."""

    num_workers: int
    num_queued: int
    num_running: int
    num_restarts: int
    num_done: int
    num_failed: int
    num_cancelled: int


def _return_reply(reply: PoolReply) -> PoolReply:
    return reply


class ProcessPool:
    """Safe to use from several threads; not after a fork. When it is dropped, its workers end."""

    def __init__(
        self,
        size: int,
        *,
        handler: str,
        settings: bytes,
        inherited_fds: Sequence[int] = (),
        max_queued: int = 64,
        max_retries: int = 1,
        start_timeout_s: float = 300.0,
        grace_s: float = 2.0,
    ) -> None:
        """`handler` is "package.module:factory" (`handler.Handler`). `inherited_fds` have the same
        numbers in the workers. A worker gets `grace_s` to end by itself when the pool is closed.
        """
        if size < 1:
            raise InvariantError(f"a pool of {size} processes")
        worker_settings = WorkerSettings(
            handler=handler,
            settings=settings,
            inherited_fds=tuple(inherited_fds),
            max_retries=max_retries,
            start_timeout_s=start_timeout_s,
            grace_s=grace_s,
        )
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._is_started = False
        self._queue = JobQueue(max_queued, num_workers=size)
        self._slots: list[Slot] = []
        self._slots += [Slot(self._queue, worker_settings, self._slots) for _ in range(size)]
        # Only a flag: a finalizer may run anywhere, also where the queue's lock is held. The
        # threads see it, or the program ends, and the workers with it.
        weakref.finalize(self, setattr, self._queue, "is_closed", True)

    def start(self) -> None:
        """Start the workers now, not with the first job. Doesn't wait for them."""
        with self._lock:
            if not self._is_started and not self._queue.is_closed:
                self._is_started = True
                for slot in self._slots:
                    slot.thread.start()

    @property
    def is_starting(self) -> bool:
        """No worker was ready yet, and it is not known that none will be. Never true again: a
        worker that ends later is replaced, and jobs wait for that.
        """
        queue = self._queue
        is_settled = any(slot.was_ready for slot in self._slots) or queue.was_refused
        return not is_settled and not queue.is_closed

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Whether all workers are ready within that time. `CapacityError` if they can't be."""
        self.start()
        deadline = time.monotonic() + timeout_s
        while not all(slot.is_ready for slot in self._slots):
            refusal = self._queue.get_refusal()
            if refusal is not None:
                raise refusal
            if time.monotonic() >= deadline or self._queue.is_closed:
                return False
            time.sleep(0.01)
        return True

    def submit(
        self,
        job: bytes,
        blocks: Sequence[Buffer] = (),
        *,
        deadline_s: float,
        wait_s: float | None = None,
        cost_s: float | None = None,
        on_reply: Callable[[PoolReply], Any] = _return_reply,
    ) -> PoolJob:
        """Waits while the queue is full; `CapacityError` if it still is after `wait_s`.

        A worker may take `deadline_s`, from the start of its work; the job may wait `wait_s` for a
        worker (`None`: as long as it may work), and longer is a `CapacityError` too. `cost_s` is an
        estimate of the work; without one, a worker that finds it long puts the job back. The
        handler gets the blocks as one; they must not change until the job is settled.
        `on_reply` runs in a thread of the pool, and what it returns is the future's result.
        """
        if len(job) > _MAX_JOB_BYTES:
            raise InvariantError(f"a job of {len(job)} bytes; {_MAX_JOB_BYTES} at most")
        self.start()
        pool_job = PoolJob(
            job=job,
            blocks=[memoryview(block).cast("B") for block in blocks if memoryview(block).nbytes],
            wait_s=deadline_s if wait_s is None else wait_s,
            deadline_s=deadline_s,
            cost_s=cost_s,
            on_reply=on_reply,
        )
        self._queue.add(pool_job)
        return pool_job

    def close(self) -> None:
        """End the workers and fail what is not done. Again: nothing."""
        self._queue.close()
        with self._lock:
            threads = [slot.thread for slot in self._slots if self._is_started]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(self._grace_s + _JOIN_S)

    def get_process_ids(self) -> list[int]:
        """Of the workers that there are now."""
        ids = [slot.process_id for slot in self._slots]
        return [process_id for process_id in ids if process_id is not None]

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            num_workers=sum(slot.is_ready for slot in self._slots),
            num_queued=len(self._queue),
            num_running=sum(slot.is_running for slot in self._slots),
            num_restarts=sum(slot.num_restarts for slot in self._slots),
            num_done=self._queue.num_done,
            num_failed=self._queue.num_failed,
            num_cancelled=self._queue.num_cancelled,
        )
