"""A pool of worker processes, for jobs that hold the GIL for long or may crash their process.

If a job crashes its worker or exceeds its deadline, only that job fails, and the worker is
replaced. Workers are fresh interpreters (nothing is forked), and nothing that they send is
unpickled. Each worker has a slot: a thread in the parent that gives jobs to the worker, replaces
it if it has died, decides whether its job is tried again, and gives up if no worker can be started.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from sensorium.multimodal.pool.channel import (
    MAX_FRAME_BYTES,
    NOT_PROCESSED,
    Buffer,
    Costly,
    Failure,
    Reply,
)
from sensorium.multimodal.pool.jobs import CLOSED, JobQueue, PoolJob, PoolReply
from sensorium.multimodal.pool.process import WorkerInterruptedError, WorkerLostError, WorkerProcess
from sensorium.types.errors import (
    CapacityError,
    FailedRequestError,
    InvariantError,
    RequestError,
    SensoriumError,
    StoppingError,
)
from sensorium.types.multimodal import MultiModalKwargsItem

_IDLE_CHECK_S = 0.5  # how often a slot looks whether its idle worker has died, or the pool is gone
_SETTLED_S = 5.0  # a worker that ends sooner, and without a job, counts as a failed start
_MAX_START_TRIES = 3
_FIRST_PAUSE_S = 0.1  # after a failed start; doubled with each
_MAX_PAUSE_S = 10.0
_START_TIMEOUT_S = 300.0
_GRACE_S = 2.0  # in which a worker may end by itself when the pool is closed
_JOIN_S = 10.0  # for a thread to end, beyond the grace of its worker
_MAX_QUEUED = 64
_MAX_RETRIES = 1  # of a job that has lost its worker
_MAX_JOB_BYTES = MAX_FRAME_BYTES - 1024
_logger = logging.getLogger(__name__)


class Slot:
    """A place in the pool for one worker process; only its thread writes its attributes."""

    def __init__(
        self, queue: JobQueue, make_process: partial[WorkerProcess], slots: Sequence[Slot]
    ) -> None:
        self._queue = queue
        self._make_process = make_process
        self._slots = slots
        self._num_failed_starts = 0  # since a worker last got a job, or was there for a while
        self._not_before = 0.0  # of `time.monotonic`: when a worker may be started again
        self._ready_at = 0.0  # of `time.monotonic`
        self.process: WorkerProcess | None = None
        self.num_starts = 0  # attempts to start a worker
        self.is_ready = False  # its worker takes jobs
        self.was_ready = False  # a worker of this slot has been ready
        self.is_running = False  # its worker runs a job
        self.thread = threading.Thread(target=self._work, name="sensorium-pool", daemon=True)

    @property
    def has_given_up(self) -> bool:
        """Return whether starts have failed so often that a worker is only started for a job."""
        return self._num_failed_starts >= _MAX_START_TRIES

    def _work(self) -> None:
        try:
            while not self._queue.is_closed:
                if self.process is not None:
                    self._serve(self.process)
                elif self._may_start():
                    self._start()
                else:
                    self._queue.wait_until_closed(_IDLE_CHECK_S)
        except WorkerInterruptedError:
            pass
        finally:
            self.is_ready = False
            if self.process is not None:
                self.process.close(_GRACE_S)
            self._queue.close()

    def _may_start(self) -> bool:
        """Return True if a worker may be started now, after a pause if the last start failed."""
        if self.has_given_up and not len(self._queue):
            return False
        self._queue.wait_until_closed(self._not_before - time.monotonic())
        return not self._queue.is_closed and time.monotonic() >= self._not_before

    def _start(self) -> None:
        self.num_starts += 1
        try:
            self.process = self._make_process(keep_waiting=self._keep_waiting)
        except (OSError, RuntimeError) as error:  # no memory, no descriptors; the program ends
            self._note_failed_start(str(error))
            return
        reason = self.process.wait_until_ready(_START_TIMEOUT_S)
        if reason is None:
            self._ready_at = time.monotonic()
            self.was_ready = self.is_ready = True  # in this order: `is_ready` implies `was_ready`
        else:
            self._lose_process()
            self._note_failed_start(reason)

    def _note_failed_start(self, reason: str) -> None:
        self._num_failed_starts += 1
        _logger.warning("a worker process for media did not start; trying again: %s", reason)
        pause_s = min(_FIRST_PAUSE_S * 2.0**self._num_failed_starts, _MAX_PAUSE_S)
        self._not_before = time.monotonic() + pause_s
        if self.has_given_up and not any(slot.is_ready for slot in self._slots):
            self._not_before = time.monotonic() + _MAX_PAUSE_S
            self._queue.refuse(
                f"media can't be processed, because no worker can start: {reason}", _MAX_PAUSE_S
            )

    def _serve(self, process: WorkerProcess) -> None:
        """Wait briefly for the next job, and run it in the worker process.

        If the process has ended, drop it, so that it is replaced, and put the job back into the
        queue.
        """
        job = self._queue.take_job(self, _IDLE_CHECK_S)
        if not process.is_alive():
            if job is not None:
                self._queue.release(self)
                self._queue.add_again(job)
            self._lose_process()
            if time.monotonic() - self._ready_at < _SETTLED_S:
                self._note_failed_start("the worker process ended before it got a job")
            else:
                self._num_failed_starts = 0
        elif job is not None:
            self.is_running = True
            try:
                self._run(process, job)
            except WorkerInterruptedError:
                raise
            except Exception:  # only this job fails: the thread continues with others
                _logger.exception("a media job failed: its worker is replaced, its request fails")
                self._lose_process()
                job.fail(FailedRequestError(NOT_PROCESSED))
            finally:
                self.is_running = False
                self._queue.release(self)

    def _run(self, process: WorkerProcess, job: PoolJob) -> None:
        """Run a job in the worker process, and settle it or put it back into the queue.

        A job is put back if its worker was lost for the first time, or if it turns out to be a long
        one.
        """
        self._num_failed_starts = 0
        is_unknown = job.cost_s is None
        try:
            message, block = process.run(
                job.job,
                job.blocks,
                deadline=time.monotonic() + job.deadline_s,
                max_cost_s=self._queue.max_unknown_cost_s if is_unknown else math.inf,
                is_long=job.is_long,
            )
        except TimeoutError:
            self._lose_process()
            reason = f"the media item could not be processed in time (limit {job.deadline_s:g} s)"
            job.fail(RequestError(reason))
        except WorkerLostError as error:
            _logger.warning(
                "a process of the media pool was lost and is replaced (a job has two tries): %s",
                error,
            )
            self._lose_process()
            job.num_lost += 1
            job.num_crashes += error.is_crash
            if job.num_lost <= _MAX_RETRIES:
                self._queue.add_again(job)
            else:
                job.fail(_make_loss(job))
        except WorkerInterruptedError:
            job.fail(StoppingError(CLOSED))
            raise
        else:
            if isinstance(message, Costly):
                self._queue.add_as_long(job, message.cost_s)
            else:
                _settle(job, message, block)

    def _lose_process(self) -> None:
        self.is_ready = False
        process, self.process = self.process, None
        if process is not None:
            process.kill()

    def _keep_waiting(self) -> bool:
        self._queue.drop_expired()
        return not self._queue.is_closed


def _make_loss(job: PoolJob) -> SensoriumError:
    """Return the error for a job that has lost all worker processes that worked on it.

    If every process crashed by itself, the item is at fault. A process that was killed from outside
    proves nothing against the item, so the client may try again.
    """
    if job.num_crashes == job.num_lost:
        return RequestError(
            f"the process that worked on the media item crashed ({job.num_lost} times): the item "
            "may be damaged"
        )
    return CapacityError(
        f"the process that worked on the media item was ended from outside "
        f"({job.num_lost} times in all): try again later"
    )


def _settle(job: PoolJob, message: Reply | Failure, block: memoryview) -> None:
    if job.future.done():
        return
    if isinstance(message, Failure):
        job.fail(message.error.make_error())
        return
    # In a separate function, because the traceback of the error must not keep the job alive.
    result, error = _call_back(job.on_reply, message, block)
    if error is None:
        job.finish(result)
    else:
        job.fail(error)


def _call_back(
    on_reply: Callable[[PoolReply], Any], message: Reply, block: memoryview
) -> tuple[Any, Exception | None]:
    try:
        kwargs: MultiModalKwargsItem = {}
        if message.header:
            from sensorium.multimodal.item_codec import decode_block

            kwargs = decode_block(message.header, block)
        return on_reply(PoolReply(reply=message.reply, kwargs=kwargs)), None
    except Exception as error:  # the caller's callback: its error, not this thread's
        return None, error


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """The counts of a pool since its start, and its present state."""

    num_workers: int  # that are ready at this moment
    num_queued: int  # at this moment
    num_running: int  # at this moment
    num_restarts: int
    num_done: int
    num_failed: int
    num_cancelled: int


def _return_reply(reply: PoolReply) -> PoolReply:
    return reply


class ProcessPool:
    """A pool of worker processes that run jobs, such as the processing of media items.

    Several threads may use it, but not the child of a fork. The workers end when the pool is closed
    or garbage-collected.
    """

    def __init__(
        self,
        size: int,
        *,
        handler: str,
        settings: bytes,
        inherited_fds: Sequence[int] = (),
        num_threads: int = 1,
    ) -> None:
        """Prepare a pool of `size` worker processes, which are not started yet.

        `handler` names the function that does the jobs, as "package.module:factory" of a
        `channel.Handler`. The factory receives `settings`. The workers inherit the file descriptors
        `inherited_fds` under the same numbers, and compute with `num_threads` threads each.
        """
        if size < 1:
            raise InvariantError(f"the media pool needs at least one process, not {size}")
        make_process = partial(
            WorkerProcess,
            handler=handler,
            settings=settings,
            inherited_fds=tuple(inherited_fds),
            num_threads=num_threads,
        )
        self._lock = threading.Lock()
        self._is_started = False
        self._queue = JobQueue(_MAX_QUEUED, num_workers=size)
        self._slots: list[Slot] = []
        self._slots += [Slot(self._queue, make_process, self._slots) for _ in range(size)]
        # The finalizer only sets a flag, because it may run anywhere, also where the queue's lock
        # is held. The threads see the flag and end their workers. If the program ends first, the
        # workers end with it.
        weakref.finalize(self, setattr, self._queue, "is_closed", True)

    def start(self) -> None:
        """Start the workers now instead of with the first job, without waiting for them."""
        with self._lock:
            if not self._is_started and not self._queue.is_closed:
                self._is_started = True
                for slot in self._slots:
                    slot.thread.start()

    @property
    def is_starting(self) -> bool:
        """Return True until a worker has been ready, or it is clear that none can start."""
        queue = self._queue
        is_settled = any(slot.was_ready for slot in self._slots) or queue.was_refused
        return not is_settled and not queue.is_closed

    @property
    def is_complete(self) -> bool:
        """Return True once each slot had a ready worker or gave up, or if the pool is closed."""
        is_settled = all(slot.was_ready or slot.has_given_up for slot in self._slots)
        return is_settled or self._queue.is_closed

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Start the worker processes, and return True when all of them are ready.

        Return False after `timeout_s`, or if the pool is closed. Raise `CapacityError` if workers
        can't be started.
        """
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
    ) -> Future[Any]:
        """Put a job into the queue, and return the future of its result.

        The handler receives `job`, which describes the work, and `blocks`, joined into a single
        block; they must not change until the future is done. A worker may work on the job for
        `deadline_s`. This call waits for room in the queue for up to `wait_s` seconds (None:
        `deadline_s`), and raises `CapacityError` if there is none. Then the job waits for a worker
        for up to `wait_s` seconds, and its future fails with a `CapacityError` if none is free.

        `cost_s` is an estimate of the work in seconds. If it is None and the job turns out to be
        long, it is put back into the queue as a long job. `on_reply` gets the handler's result in a
        thread of the pool, and returns the result of the future.
        """
        if len(job) > _MAX_JOB_BYTES:
            raise InvariantError(
                f"a job for the media pool has {len(job)} bytes; {_MAX_JOB_BYTES} are allowed"
            )
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
        return pool_job.future

    def close(self) -> None:
        """End the workers, and fail all jobs that are not done. Further calls do nothing."""
        self._queue.close()
        with self._lock:
            threads = [slot.thread for slot in self._slots if self._is_started]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_GRACE_S + _JOIN_S)

    def get_process_ids(self) -> list[int]:
        processes = [slot.process for slot in self._slots]
        return [process.process_id for process in processes if process is not None]

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            num_workers=sum(slot.is_ready for slot in self._slots),
            num_queued=len(self._queue),
            num_running=sum(slot.is_running for slot in self._slots),
            num_restarts=sum(max(0, slot.num_starts - 1) for slot in self._slots),
            num_done=self._queue.num_done,
            num_failed=self._queue.num_failed,
            num_cancelled=self._queue.num_cancelled,
        )
