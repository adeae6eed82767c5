"""Writes entries in a thread of its own, so that no request waits for a disk or a network."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)
_MAX_WAITING_BYTES = 2**28  # of entries that are not written yet; further ones are dropped
_CLOSE_S = 10.0  # how long the end of a process waits for entries to be written


class BackgroundWriter:
    """A thread that runs jobs one after another, with a limit on the memory that they hold.

    A job beyond the limit is dropped and counted: a tier is only a copy.
    """

    def __init__(self, max_waiting_bytes: int = _MAX_WAITING_BYTES) -> None:
        self.num_dropped = 0
        self._max_waiting_bytes = max_waiting_bytes
        self._num_waiting_bytes = 0
        self._lock = threading.Lock()  # of the fields above
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, job: Callable[[], object], num_bytes: int) -> None:
        """Run a job, which holds `num_bytes` of memory, in the thread, or drop it at the limit."""
        with self._lock:
            is_full = self._num_waiting_bytes + num_bytes > self._max_waiting_bytes
            if self._is_closed or (is_full and self._num_waiting_bytes):
                self.num_dropped += 1
                return
            self._num_waiting_bytes += num_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tiers", daemon=True)
                self._thread.start()
            self._jobs.put((job, num_bytes))

    def wait(self, timeout_s: float) -> bool:
        """Return True once everything submitted so far is done, or False at the timeout."""
        done = threading.Event()
        with self._lock:
            if self._thread is None or self._is_closed:
                return True
            self._jobs.put((done.set, 0))
        return done.wait(timeout_s)

    def close(self) -> None:
        """Run the jobs that wait, within some seconds, and end the thread."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (waiting := self._jobs.get()) is not None:
            job, num_bytes = waiting
            try:
                job()
            except Exception:  # the thread must outlive every job
                logger.warning("an entry of a media tier could not be written", exc_info=True)
            finally:
                del job, waiting
                with self._lock:
                    self._num_waiting_bytes -= num_bytes
