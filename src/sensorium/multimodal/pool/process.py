"""One worker process as its parent sees it: it is started, given jobs, and ended.

A `WorkerProcess` is used by one thread, which has to outlive the process: the system kills the
process when that thread ends. Nothing is tried again here: a worker that has failed must be
replaced by a new one.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from sensorium.multimodal.pool.channel import (
    Buffer,
    Channel,
    ChannelError,
    Costly,
    Failure,
    Job,
    Message,
    Ready,
    Reply,
    Start,
    StartFailed,
    decode_message,
    encode_message,
    get_remaining,
    map_privately,
)

_POLL_S = 0.1  # how often `keep_waiting` is called
_DRAIN_S = 1.0  # for reading what an ended worker has written
_END_S = 10.0  # from the end of a worker's connection to the end of its process
# The return codes of a process that crashed: `subprocess` gives a signal as a negative number.
_CRASHES = frozenset(
    -number
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
)
_logger = logging.getLogger(__name__)


class WorkerLostError(Exception):
    """The worker process has ended, or has sent a message that is not valid at this point."""

    def __init__(self, message: str, *, is_crash: bool = False) -> None:
        super().__init__(message)
        # True if the process crashed, for example by a bad access to memory. False if it was ended
        # from outside, as by SIGKILL, or if the reason is not known.
        self.is_crash = is_crash


class WorkerInterruptedError(Exception):
    """The pool is stopping and no longer waits for the answer of the worker process."""


class WorkerProcess:
    """A worker process of the media pool, as its parent sees it.

    `keep_waiting` is called regularly while the parent waits for the worker. If it returns False,
    the wait ends with a `WorkerInterruptedError`.
    """

    def __init__(
        self,
        *,
        handler: str,
        settings: bytes,
        inherited_fds: Sequence[int],
        num_threads: int,
        keep_waiting: Callable[[], bool],
    ) -> None:
        self._keep_waiting = keep_waiting
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._process = _spawn(theirs.fileno(), inherited_fds, num_threads)
        except BaseException:
            ours.close()
            raise
        self._reader = threading.Thread(
            target=_log_lines, args=(self._process.stdout,), name="pool-log", daemon=True
        )
        self._reader.start()
        self._channel = Channel(ours)
        self._start = encode_message(Start(handler, settings))

    @property
    def process_id(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, timeout_s: float) -> str | None:
        """Wait until the worker accepts jobs, and return None, or the reason why it does not."""
        deadline = time.monotonic() + timeout_s
        try:
            self._channel.send(self._start, deadline=deadline)
            message, _ = self._receive(deadline, map_privately)
        except TimeoutError:
            return f"the worker process was not ready within {timeout_s:g} s"
        except (OSError, ChannelError):
            return f"the worker process ended with {self._end()} while it started"
        except WorkerLostError as error:
            return str(error)
        if isinstance(message, StartFailed):
            return message.reason
        return (
            None
            if isinstance(message, Ready)
            else f"the worker process has sent {type(message).__name__}, not Ready"
        )

    def run(
        self,
        job: bytes,
        blocks: Sequence[Buffer],
        *,
        deadline: float,
        max_cost_s: float,
        is_long: bool = False,
    ) -> tuple[Reply | Failure | Costly, memoryview]:
        """Give a job to the worker, and return its answer and the block with the result's tensors.

        `deadline` is a time of `time.monotonic`. Raise `TimeoutError` after it, and
        `WorkerLostError` if the process ends or sends a message that is no answer.
        """
        try:
            message_bytes = encode_message(Job(job, max_cost_s, is_long))
            self._channel.send(message_bytes, blocks, deadline=deadline)
            message, block = self._receive(deadline, map_for_long)
        except TimeoutError:
            raise
        except (OSError, ChannelError) as error:
            end = self._end()
            is_crash = self._process.returncode in _CRASHES
            raise WorkerLostError(
                f"{error}; the worker process ended with {end}", is_crash=is_crash
            ) from error
        if not isinstance(message, Reply | Failure | Costly):
            raise WorkerLostError(f"the worker sent {type(message).__name__}, not a result")
        return message, block

    def close(self, grace_s: float) -> None:
        """Close the connection, and return when the process has ended; kill it after `grace_s`."""
        self._channel.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_DRAIN_S)

    def kill(self) -> None:
        self._process.kill()
        self.close(0.0)

    def _receive(
        self, deadline: float, map_block: Callable[[int, int], memoryview]
    ) -> tuple[Message, memoryview]:
        while not self._channel.is_readable(min(_POLL_S, get_remaining(deadline))):
            if not self._keep_waiting():
                raise WorkerInterruptedError
        frame, block = self._channel.receive(deadline=deadline, map_block=map_block)
        try:
            return decode_message(frame), block
        except msgspec.MsgspecError as error:
            raise WorkerLostError("the worker sent a message that can't be decoded") from error

    def _end(self) -> str:
        """Wait for the process to end after its connection broke; return its status or signal."""
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "its connection closed"
        return f"status {status}" if status >= 0 else f"signal {-status}"


def map_for_long(descriptor: int, num_bytes: int) -> memoryview:
    """Return a writable view of a descriptor's memory, which keeps no descriptor open.

    So a cache may keep many of these views.
    """
    import torch

    path = f"/proc/self/fd/{descriptor}"
    try:
        mapping = torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:  # torch raises this for an error of the system
        raise OSError(str(error)) from error
    return mapping.numpy().data


def _spawn(
    descriptor: int, inherited_fds: Sequence[int], num_threads: int
) -> subprocess.Popen[bytes]:
    # With -P and this path the worker imports the same modules as this process, and no others.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": str(num_threads),
    }
    module = "sensorium.multimodal.pool.worker"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(descriptor), str(os.getpid())],
        pass_fds=(descriptor, *inherited_fds),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the parent; see also `priority`
    )


def _log_lines(lines: IO[bytes]) -> None:
    with lines:
        for line in lines:
            _logger.warning(
                "a worker process of the media pool: %s", line.decode(errors="replace").rstrip()
            )
