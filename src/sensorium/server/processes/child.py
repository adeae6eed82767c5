"""What every child process does first and last: hears its parent, logs, and never outlives it."""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from sensorium.server.processes.control import Channel, Failed, expect
from sensorium.types.errors import InvariantError, SensoriumError

logger = logging.getLogger(__name__)
Message = TypeVar("Message")
Start = TypeVar("Start")
_REMOVAL_TRIES = 3
_MAX_MESSAGE_LENGTH = 4000


def open_channel(decoder: msgspec.json.Decoder[Message]) -> Channel[Message]:
    """By the descriptor that is the last in argv. Signals are for the parent, which says what
    follows of them: a terminal or a service manager sends them to all processes.
    """
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor = int(sys.argv[-1])
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor), decoder)


def receive_start(channel: Channel[Any], kind: type[Start]) -> Start:
    """The first message. Without a parent there is none, and this process ends."""
    message = channel.receive()
    if message is None:
        sys.exit(1)
    return expect(message, kind)


def follow_parent(
    channel: Channel[Message], on_message: Callable[[Message], object], *, socket_dir: str
) -> None:
    """From now on in a thread, so that nothing the main thread does can delay the end. A child
    that can't hear its parent ends too, and is started again.
    """
    channel.start_reading(
        on_message,
        on_end=lambda: end_with_parent(socket_dir),
        on_failure=lambda: os._exit(1),
    )


def end_with_parent(socket_dir: str) -> None:
    """The parent was killed, or it would have said something: what it had is removed here."""
    for _ in range(_REMOVAL_TRIES):  # other children remove it too, or still write
        shutil.rmtree(socket_dir, ignore_errors=True)
        if not os.path.exists(socket_dir):
            break
    os._exit(1)


def report_failure(channel: Channel[Any], error: BaseException) -> None:
    """Tell the parent why this process can't start. Only a bug of ours needs a traceback."""
    if isinstance(error, InvariantError) or not isinstance(error, SensoriumError):
        logger.error("this process can't start", exc_info=error)
    message = str(error) if isinstance(error, SensoriumError) else _describe(error)
    channel.send(Failed(message[:_MAX_MESSAGE_LENGTH]))


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
