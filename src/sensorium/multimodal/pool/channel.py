"""The connection between the parent and a worker of the pool, and the messages on it.

A message is a small frame (encoded values) and a block of bytes. A block of more than
`MAX_INLINE_BYTES` is written once into new shared memory (a memfd), and mapped by the receiver.
Then the socket carries only the descriptor. Deadlines are times of `time.monotonic`, and None means
no deadline.

Invariants:
  1. A mapped block can't shrink (it is sealed) and has the size that its message gives, so that no
     access to it can end in a SIGBUS.
  2. A process that writes to a block that it received changes only its own copy (a private
     mapping).
  3. No descriptor outlives the call that made or received it, except those within an `mmap`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from sensorium.types.errors import CapacityError, ErrorRecord, RequestError, make_record

if TYPE_CHECKING:
    from sensorium.types.multimodal import MultiModalKwargsItem


MAX_INLINE_BYTES = 64 * 2**10
MAX_FRAME_BYTES = 16 * 2**20
# The size of the frame in bytes, whether the block is mapped, and the size of the block in bytes.
_PREFIX = struct.Struct("<IIQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_NUM_BUFFERS = 512  # in one call of the system, which takes 1024 at most

Buffer = bytes | bytearray | memoryview | mmap.mmap


class ChannelError(Exception):
    """The other end has closed the connection, or has sent bytes that are not a valid message."""


def get_remaining(deadline: float) -> float:
    """Return the seconds until `deadline`, or raise `TimeoutError` if it has passed."""
    remaining = deadline - time.monotonic()
    if remaining <= 0.0:
        raise TimeoutError
    return remaining


def map_privately(descriptor: int, num_bytes: int) -> memoryview:
    """Return a private, writable view of a descriptor's memory; it keeps a descriptor open."""
    mapping = mmap.mmap(
        descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )
    return memoryview(mapping)


class Channel:
    """One end of the connection between parent and worker, for one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def is_readable(self, timeout_s: float) -> bool:
        """Return True if a message or the end of the connection comes in `timeout_s` seconds."""
        return bool(self._poll.poll(timeout_s * 1000.0))

    def send(
        self, frame: bytes, blocks: Sequence[Buffer] = (), *, deadline: float | None = None
    ) -> None:
        """Send one message: a frame of encoded values, and blocks of binary data.

        The blocks are flat buffers of bytes, and the receiver gets them joined into a single block.
        Raise `TimeoutError` after the deadline, and `ValueError` if the frame has more than
        `MAX_FRAME_BYTES`.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(
                "the description of a media item is too long for a message to another process: "
                f"it has {len(frame)} bytes, and {MAX_FRAME_BYTES} are allowed"
            )
        views = [view for block in blocks if (view := memoryview(block)).nbytes]
        num_bytes = sum(view.nbytes for view in views)
        is_mapped = num_bytes > MAX_INLINE_BYTES
        prefix = _PREFIX.pack(len(frame), is_mapped, num_bytes)
        self._set_deadline(deadline)
        if not is_mapped:
            self.connection.sendall(b"".join((prefix, frame, *views)))
            return
        descriptor = _make_block(views, num_bytes)
        try:
            content = prefix + frame
            num_sent = socket.send_fds(self.connection, [content], [descriptor])
        finally:
            os.close(descriptor)
        self.connection.sendall(memoryview(content)[num_sent:])

    def receive(
        self,
        *,
        deadline: float | None = None,
        map_block: Callable[[int, int], memoryview] = map_privately,
    ) -> tuple[bytes, memoryview]:
        """Wait for one message, and return its frame and its writable block of binary data.

        For a large block, `map_block` turns a file descriptor and a size in bytes into a view.
        Raise `TimeoutError` after the deadline, and `ChannelError` if the connection is closed or
        the message is not valid.
        """
        with ExitStack() as stack:
            prefix, descriptors = self._receive_prefix(deadline, stack)
            frame_bytes, is_mapped, num_bytes = _PREFIX.unpack(prefix)
            if frame_bytes > MAX_FRAME_BYTES or is_mapped != len(descriptors):
                raise ChannelError("the other process has sent a message with a wrong header")
            if not is_mapped and num_bytes > MAX_INLINE_BYTES:
                raise ChannelError(
                    f"the other process sent a message of more than {MAX_INLINE_BYTES} bytes"
                )
            frame = bytes(self._receive_exactly(frame_bytes, deadline))
            if not is_mapped:
                return frame, memoryview(self._receive_exactly(num_bytes, deadline))
            _check_block(descriptors[0], num_bytes)
            return frame, map_block(descriptors[0], num_bytes)

    def close(self) -> None:
        self.connection.close()

    def _set_deadline(self, deadline: float | None) -> None:
        self.connection.settimeout(None if deadline is None else get_remaining(deadline))

    def _receive_prefix(self, deadline: float | None, stack: ExitStack) -> tuple[bytes, list[int]]:
        """Return the prefix of a message, and its file descriptors, which `stack` closes."""
        self._set_deadline(deadline)
        prefix, ancillary, flags, _ = self.connection.recvmsg(
            _PREFIX.size, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC
        )
        descriptors = [
            int.from_bytes(content, sys.byteorder)
            for level, kind, content in ancillary
            if (level, kind, len(content)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, 4)
        ]
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        if not prefix:
            raise ChannelError("the connection was closed by the process at its other end")
        if flags & socket.MSG_CTRUNC:
            raise ChannelError("a message of the pool has more file descriptors than it may")
        return prefix + self._receive_exactly(_PREFIX.size - len(prefix), deadline), descriptors

    def _receive_exactly(self, num_bytes: int, deadline: float | None) -> bytearray:
        content = bytearray(num_bytes)
        rest = memoryview(content)
        while rest:
            self._set_deadline(deadline)
            num_received = self.connection.recv_into(rest)
            if num_received == 0:
                raise ChannelError("the other process has closed the connection")
            rest = rest[num_received:]
        return content


def _make_block(views: list[memoryview], num_bytes: int) -> int:
    """Return the descriptor of new, sealed memory (a memfd) that holds the bytes of all views."""
    descriptor = os.memfd_create("sensorium-block", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = views
        offset = 0
        while offset < num_bytes:
            # Not through a mapping: the system would first fill each of its pages with zeros.
            num_written = os.pwritev(descriptor, rest[:_NUM_BUFFERS], offset)
            offset += num_written
            rest = _drop_first_bytes(rest, num_written)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _drop_first_bytes(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []


def _check_block(descriptor: int, num_bytes: int) -> None:
    try:
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError as error:
        raise ChannelError("the other process sent memory that is not a sealed memfd") from error
    if not is_sealed or os.fstat(descriptor).st_size != num_bytes:
        raise ChannelError(
            "the other process has sent memory that is not sealed, or not as large as announced"
        )


class CostlyJobError(Exception):
    """The job is estimated to take longer than it may, and has to be run as a long job."""

    def __init__(self, cost_s: float) -> None:
        super().__init__(f"the media job takes about {cost_s:.1f} s, and must be run as a long one")
        self.cost_s = cost_s


class Handler(Protocol):
    """The function that does a worker's jobs in one thread, made by `factory(settings: bytes)`."""

    def __call__(
        self, job: bytes, block: memoryview, *, max_cost_s: float
    ) -> tuple[bytes, MultiModalKwargsItem]:
        """Do a job, and return the encoded reply and the tensors of the result, if there are any.

        `job` describes the work, and `block` is its binary input, which the handler may write to
        but not keep. If the job would take more than `max_cost_s` seconds, raise `CostlyJobError`.
        A `RequestError` or `CapacityError` reaches the caller of the pool with its text. For any
        other error, the caller gets only a general text.
        """
        ...

    def close(self) -> None:
        """Free what the handler holds; called before its worker process ends, unless killed."""
        ...


NOT_PROCESSED = (
    "the media item could not be processed: the server failed, and its log has the reason"
)
NO_MEMORY = "the media item needs more memory than one item may take: send a smaller one"
_MAX_MESSAGE_LENGTH = 2000


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message to a worker process, which names the handler that does its jobs."""

    handler: str  # "package.module:factory"
    settings: bytes


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The message of a worker process that has made its handler and now accepts jobs."""


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message of a worker process that could not make its handler, with the reason."""

    reason: str


class Job(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The message that gives a job to a worker process, with its binary input as the block."""

    job: bytes
    max_cost_s: float  # a job of more work is not done, but answered by `Costly`; may be infinite
    is_long: bool  # the job is done at a low priority


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a job that was done, with the tensors of the result as the block."""

    reply: bytes
    header: bytes  # describes the tensors in its block; empty: there are none


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a job that has failed; the worker still accepts further jobs."""

    error: ErrorRecord


class Costly(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a job that was not done, because it would take too long."""

    cost_s: float  # estimated


Message = Start | Ready | StartFailed | Job | Reply | Failure | Costly

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
encode_message = msgspec.msgpack.Encoder().encode
decode_message = _decoder.decode


def make_failure(error: RequestError | CapacityError) -> Failure:
    """Return the message for an error of a job, with a text that is short enough for a frame."""
    record = make_record(error)
    return Failure(replace(record, message=record.message[:_MAX_MESSAGE_LENGTH]))
