"""The process of one worker: makes its handler, then answers one job after another.

This module is run by `process.WorkerProcess` and never imported by the parent. To start fast, it
does not import torch itself: the handler does, or the encoding of the first tensors that the
handler returns. The process ends when its parent does.

A long job runs at a low priority, so that it uses only CPU time that no other work needs. Linux
weighs threads by their nice value only within one scheduling group, and by default makes a group of
every session (`autogroup`). A worker is a session of its own, so both values are set: the thread's,
and the group's for as long as the job runs. A thread can't raise its priority again without
privileges, so a long job gets a new thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sensorium.multimodal.pool.channel import (
    MAX_FRAME_BYTES,
    NO_MEMORY,
    NOT_PROCESSED,
    Channel,
    ChannelError,
    Costly,
    CostlyJobError,
    Handler,
    Job,
    Ready,
    Reply,
    Start,
    StartFailed,
    decode_message,
    encode_message,
    make_failure,
)
from sensorium.types.errors import CapacityError, FailedRequestError, RequestError, SensoriumError
from sensorium.utils.process import without_collection

if TYPE_CHECKING:
    from sensorium.types.multimodal import MultiModalKwargsItem


_NICE = 10  # gives the job about a tenth of a core that other processes also want
_AUTOGROUP = "/proc/self/autogroup"
_RETRY_S = 0.03
_MAX_TRIES = 50
_Result = TypeVar("_Result")


def run_at_low_priority(function: Callable[[], _Result]) -> _Result:
    """Call the function at a low CPU priority, and return its result or raise its error."""
    _set_group_priority(_NICE)
    try:
        with ThreadPoolExecutor(max_workers=1, initializer=_lower_this_thread) as executor:
            return executor.submit(function).result()
    finally:
        _set_group_priority(0)


def _lower_this_thread() -> None:
    with suppress(OSError):  # a sandbox may forbid it; the job still has to be done
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _set_group_priority(nice: int) -> None:
    for _ in range(_MAX_TRIES):
        try:
            with open(_AUTOGROUP, "w") as file:
                file.write(str(nice))
            return
        except BlockingIOError:  # unprivileged processes together may do this once in 0.1 s
            time.sleep(_RETRY_S)
        except OSError:  # not every kernel has such groups
            return


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MAX_REASON_LENGTH = 2000
_logger = logging.getLogger(__name__)


def main() -> None:
    descriptor, parent_id = map(int, sys.argv[1:])
    _end_with_parent(parent_id)
    _prefer_to_be_killed()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    faulthandler.enable()
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    handler: Handler | None = None
    try:
        with without_collection():
            handler = _start(channel)
        if handler is not None:
            channel.send(encode_message(Ready()))
            while True:
                _serve(channel, handler)
    except (ChannelError, ConnectionError):
        pass  # the parent is gone, or has closed the connection
    finally:
        if handler is not None:
            handler.close()
        channel.close()


def _end_with_parent(parent_id: int) -> None:
    """Make the system kill this process when its parent ends, even in the middle of a job.

    The system sends the signal when the thread that started this process ends. While the parent
    lives, that thread ends only after this process. Exit at once if the parent is gone already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_id:  # it ended before the line above
        sys.exit(1)


def _prefer_to_be_killed() -> None:
    """Make the system kill this worker, which can be replaced, before others if memory is full."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def _start(channel: Channel) -> Handler | None:
    """Receive the `Start` message, and return the handler that it names.

    If the handler can't be made, send the reason to the parent and return None.
    """
    frame, _ = channel.receive()
    message = decode_message(frame)
    if not isinstance(message, Start):
        raise ChannelError(f"the server sent {type(message).__name__} to a worker before Start")
    try:
        module, _, factory = message.handler.partition(":")
        handler: Handler = getattr(importlib.import_module(module), factory)(message.settings)
    except Exception as error:  # the parent must learn the reason, whatever it is
        _logger.exception("a worker process of the media pool could not start")
        reason = str(error)
        if not isinstance(error, SensoriumError):
            reason = f"{type(error).__name__}: {error}"
        channel.send(encode_message(StartFailed(reason[:_MAX_REASON_LENGTH])))
        return None
    _limit_threads()
    return handler


def _limit_threads() -> None:
    torch = sys.modules.get("torch")  # if it is imported later, it reads OMP_NUM_THREADS
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _serve(channel: Channel, handler: Handler) -> None:
    frame, block = channel.receive()
    message = decode_message(frame)
    if not isinstance(message, Job):
        raise ChannelError(f"the server sent {type(message).__name__} to a worker, not a Job")
    work = partial(handler, message.job, block, max_cost_s=message.max_cost_s)
    try:
        reply = run_at_low_priority(work) if message.is_long else work()
        frame, buffers = _encode_reply(*reply)
    except CostlyJobError as error:
        frame, buffers = encode_message(Costly(error.cost_s)), []
    except (RequestError, CapacityError) as error:
        frame, buffers = encode_message(make_failure(error)), []
    except MemoryError:  # the item needs more than the limit on memory (`limit_memory_growth`)
        frame, buffers = encode_message(make_failure(RequestError(NO_MEMORY))), []
    except Exception:  # only this job fails, and its caller gets no internal text
        _logger.exception("a job of the media pool failed, so its request fails")
        frame, buffers = encode_message(make_failure(FailedRequestError(NOT_PROCESSED))), []
    channel.send(frame, buffers)


def _encode_reply(reply: bytes, kwargs: MultiModalKwargsItem) -> tuple[bytes, list[memoryview]]:
    header, buffers = b"", []
    if kwargs:
        from sensorium.multimodal.item_codec import as_buffers, encode_header

        header, buffers = encode_header(kwargs), as_buffers(kwargs)
    frame = encode_message(Reply(reply, header))
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(
            f"the reply to a media job has {len(frame)} bytes; {MAX_FRAME_BYTES} are allowed"
        )
    return frame, buffers


if __name__ == "__main__":
    main()
