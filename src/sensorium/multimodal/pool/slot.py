"""One place for a worker in the pool: keeps a process in it and gives it jobs, in a thread.

Replaces a process that has died, decides what becomes of its job, and gives up on processes that
can't be started. Knows nothing of the pool but the queue and the other slots.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sensorium.multimodal.pool.jobs import JobQueue, PoolJob, PoolReply
from sensorium.multimodal.pool.messages import (
    NOT_PROCESSED,
    Costly,
    Failure,
    Reply,
)
from sensorium.multimodal.pool.process import WorkerInterruptedError, WorkerLostError, WorkerProcess
from sensorium.types.errors import CapacityError, FailedRequestError, RequestError, SensoriumError
from sensorium.types.multimodal import MultiModalKwargsItem

_IDLE_CHECK_S = 0.5  # how soon it is seen that an idle worker has died, or the pool was dropped
_SETTLED_S = 5.0  # a worker that ends sooner, and without a job, has not really started
_MAX_START_TRIES = 3
_FIRST_PAUSE_S = 0.1  # after a failed start; doubled with each
_MAX_PAUSE_S = 10.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker is started. `grace_s`: what it gets to end by itself."""

    handler: str
    settings: bytes
    inherited_fds: tuple[int, ...]
    max_retries: int
    start_timeout_s: float
    grace_s: float


class Slot:
    """Its attributes are written by its own thread only."""

    def __init__(self, queue: JobQueue, settings: WorkerSettings, slots: Sequence[Slot]) -> None:
        self._queue = queue
        self._settings = settings
        self._slots = slots
        self._process: WorkerProcess | None = None
        self._num_failed_starts = 0
        self._not_before = 0.0
        self._ready_at = 0.0
        self._num_starts = 0
        self.is_ready = False
        self.was_ready = False
        self.is_running = False
        self.thread = threading.Thread(target=self._work, name="sensorium-pool", daemon=True)

    @property
    def has_failed(self) -> bool:
        """Whether its worker could not be started the last time that this was tried."""
        return self._num_failed_starts > 0

    @property
    def num_restarts(self) -> int:
        return max(0, self._num_starts - 1)

    @property
    def process_id(self) -> int | None:
        process = self._process
        return None if process is None else process.process_id

    def _work(self) -> None:
        try:
            self._let_the_first_start()
            while not self._queue.is_closed:
                if self._process is not None:
                    self._serve(self._process)
                elif self._may_start():
                    self._start()
                else:
                    self._queue.wait_until_closed(_IDLE_CHECK_S)
        except WorkerInterruptedError:
            pass
        finally:
            self.is_ready = False
            if self._process is not None:
                self._process.close(self._settings.grace_s)
            self._queue.close()

    def _let_the_first_start(self) -> None:
        """Wait until the first worker has started, or has failed to. Two at once would take twice
        as long on a machine with few cores, and the server needs one as soon as it can be.
        """
        first = self._slots[0]
        while first is not self and not (first.was_ready or first.has_failed):
            if self._queue.is_closed:
                return
            self._queue.wait_until_closed(_IDLE_CHECK_S)

    def _may_start(self) -> bool:
        if self._num_failed_starts >= _MAX_START_TRIES and not len(self._queue):
            return False
        self._queue.wait_until_closed(self._not_before - time.monotonic())
        return not self._queue.is_closed and time.monotonic() >= self._not_before

    def _start(self) -> None:
        settings = self._settings
        self._num_starts += 1
        try:
            self._process = WorkerProcess(
                handler=settings.handler,
                settings=settings.settings,
                inherited_fds=settings.inherited_fds,
                keep_waiting=self._keep_waiting,
            )
        except (OSError, RuntimeError) as error:  # no memory, no descriptors; the program ends
            self._note_failed_start(str(error))
            return
        reason = self._process.wait_until_ready(settings.start_timeout_s)
        if reason is None:
            self._ready_at = time.monotonic()
            self.was_ready = self.is_ready = True  # in this order: who is ready was ready
        else:
            self._lose_process()
            self._note_failed_start(reason)

    def _note_failed_start(self, reason: str) -> None:
        self._num_failed_starts += 1
        _logger.warning("a worker that processes media could not be started: %s", reason)
        pause_s = min(_FIRST_PAUSE_S * 2.0**self._num_failed_starts, _MAX_PAUSE_S)
        self._not_before = time.monotonic() + pause_s
        if self._num_failed_starts >= _MAX_START_TRIES and not any(
            slot.is_ready for slot in self._slots
        ):
            self._not_before = time.monotonic() + _MAX_PAUSE_S
            self._queue.refuse(f"media can't be processed: {reason}", _MAX_PAUSE_S)

    def _serve(self, process: WorkerProcess) -> None:
        job = self._queue.take_job(self, _IDLE_CHECK_S)
        if not process.is_alive():
            if job is not None:
                self._queue.release(self)
                self._queue.add_again(job)
            self._lose_process()
            if time.monotonic() - self._ready_at < _SETTLED_S:
                self._note_failed_start("it ended without a job")
            else:
                self._num_failed_starts = 0
        elif job is not None:
            self.is_running = True
            try:
                self._run(process, job)
            except WorkerInterruptedError:
                raise
            except Exception:  # a job fails alone, whatever happens to it here
                _logger.exception("a job of the pool failed")
                self._lose_process()
                job.fail(FailedRequestError(NOT_PROCESSED))
            finally:
                self.is_running = False
                self._queue.release(self)

    def _run(self, process: WorkerProcess, job: PoolJob) -> None:
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
            reason = f"it could not be processed in time ({job.deadline_s:g} seconds)"
            job.fail(RequestError(reason))
        except WorkerLostError as error:
            _logger.warning("a worker that processed media was lost: %s", error)
            self._lose_process()
            self._try_again(job, error)
        except WorkerInterruptedError:
            job.fail(CapacityError("media can't be processed: the server is stopping"))
            raise
        else:
            if isinstance(message, Costly):
                self._queue.add_as_long(job, message.cost_s)
            else:
                _settle(job, message, block)

    def _try_again(self, job: PoolJob, error: WorkerLostError) -> None:
        job.num_lost += 1
        job.num_crashes += error.is_crash
        if job.num_lost <= self._settings.max_retries:
            self._queue.add_again(job)
        else:
            job.fail(_make_loss(job))

    def _lose_process(self) -> None:
        self.is_ready = False
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _keep_waiting(self) -> bool:
        self._queue.drop_expired()
        return not self._queue.is_closed


def _make_loss(job: PoolJob) -> SensoriumError:
    """Return the error for a job that has lost all its workers. The item is at fault only if every
    one of them crashed by itself. A worker that was killed from outside proves nothing against the
    item, so the caller may try again.
    """
    if job.num_crashes == job.num_lost:
        return RequestError(f"the process that worked on it crashed ({job.num_lost} times)")
    return CapacityError(
        f"the process that worked on it was ended from outside ({job.num_lost} times in all)"
    )


def _settle(job: PoolJob, message: Reply | Failure, block: memoryview) -> None:
    if job.future.done():
        return
    if isinstance(message, Failure):
        job.fail(message.error.make_error())
        return
    result, error = _call_back(job.on_reply, message, block)
    if error is None:
        job.finish(result)
    else:
        job.fail(error)


def _call_back(
    on_reply: Callable[[PoolReply], Any], message: Reply, block: memoryview
) -> tuple[Any, Exception | None]:
    """Apart from `_settle`, so that the error's traceback doesn't hold the job that holds it."""
    try:
        kwargs = _decode(message.header, block)
        return on_reply(PoolReply(reply=message.reply, kwargs=kwargs)), None
    except Exception as error:  # the caller's callback: its error, not this thread's
        return None, error


def _decode(header: bytes, block: memoryview) -> MultiModalKwargsItem:
    if not header:
        return {}
    from sensorium.multimodal.item_codec import decode_block

    return decode_block(header, block)
