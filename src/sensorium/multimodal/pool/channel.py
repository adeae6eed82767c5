"""One end of the socket between the parent and a worker: a small frame and, beside it, a block.

A block of more than `MAX_INLINE_BYTES` is written once into memory of its own (a memfd) and mapped
by the receiver; the socket carries only its descriptor.

Invariants:
  1. A mapped block can't shrink (it is sealed) and is as large as was said: no access faults.
  2. What either side writes to a block that it received stays its own (a private mapping).
  3. No descriptor outlives the call that made or received it, but for those within an `mmap`.
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

MAX_INLINE_BYTES = 64 * 2**10
MAX_FRAME_BYTES = 16 * 2**20
_PREFIX = struct.Struct("<IIQ")  # bytes of the frame, whether the block is mapped, its bytes
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_NUM_BUFFERS = 512  # in one call of the system, which takes 1024 at most

Buffer = bytes | bytearray | memoryview | mmap.mmap


class ChannelError(Exception):
    """The other end is gone, or says what makes no sense: nothing more can come from it."""


def get_remaining(deadline: float) -> float:
    """The seconds until then. `TimeoutError` if there are none."""
    remaining = deadline - time.monotonic()
    if remaining <= 0.0:
        raise TimeoutError
    return remaining


def map_privately(descriptor: int, num_bytes: int) -> memoryview:
    """Keeps a descriptor open for as long as the view lives."""
    mapping = mmap.mmap(
        descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )
    return memoryview(mapping)


class Channel:
    """Not thread-safe: one thread at each end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def is_readable(self, timeout_s: float) -> bool:
        """Whether something (it may be the end) comes within that time."""
        return bool(self._poll.poll(timeout_s * 1000.0))

    def send(
        self, frame: bytes, blocks: Sequence[Buffer] = (), *, deadline: float | None = None
    ) -> None:
        """The receiver gets the blocks, which are flat and of bytes, as one. `TimeoutError` after
        the deadline.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame)} bytes, {MAX_FRAME_BYTES} at most")
        views = [view for block in blocks if (view := memoryview(block)).nbytes]
        num_bytes = sum(view.nbytes for view in views)
        is_mapped = num_bytes > MAX_INLINE_BYTES
        prefix = _PREFIX.pack(len(frame), is_mapped, num_bytes)
        self._set_deadline(deadline)
        if not is_mapped:
            self._connection.sendall(b"".join((prefix, frame, *views)))
            return
        descriptor = _make_block(views, num_bytes)
        try:
            content = prefix + frame
            num_sent = socket.send_fds(self._connection, [content], [descriptor])
        finally:
            os.close(descriptor)
        self._connection.sendall(memoryview(content)[num_sent:])

    def receive(
        self,
        *,
        deadline: float | None = None,
        map_block: Callable[[int, int], memoryview] = map_privately,
    ) -> tuple[bytes, memoryview]:
        """A frame and its block, which is writable. `TimeoutError` after the deadline."""
        prefix, descriptors = self._receive_prefix(deadline)
        try:
            frame_bytes, is_mapped, num_bytes = _PREFIX.unpack(prefix)
            if frame_bytes > MAX_FRAME_BYTES or is_mapped != len(descriptors):
                raise ChannelError("a message that can't be read")
            if not is_mapped and num_bytes > MAX_INLINE_BYTES:
                raise ChannelError("a block that should have been mapped")
            frame = bytes(self._receive_exactly(frame_bytes, deadline))
            if not is_mapped:
                return frame, memoryview(self._receive_exactly(num_bytes, deadline))
            _check_block(descriptors[0], num_bytes)
            return frame, map_block(descriptors[0], num_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        self._connection.close()

    def _set_deadline(self, deadline: float | None) -> None:
        self._connection.settimeout(None if deadline is None else get_remaining(deadline))

    def _receive_prefix(self, deadline: float | None) -> tuple[bytes, list[int]]:
        """The descriptor comes with the first byte of its message."""
        self._set_deadline(deadline)
        prefix, ancillary, flags, _ = self._connection.recvmsg(
            _PREFIX.size, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC
        )
        descriptors = [
            int.from_bytes(content, sys.byteorder)
            for level, kind, content in ancillary
            if (level, kind, len(content)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, 4)
        ]
        try:
            if not prefix or flags & socket.MSG_CTRUNC:
                raise ChannelError("the other end is gone, or sent what could not be taken")
            return prefix + self._receive_exactly(_PREFIX.size - len(prefix), deadline), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _receive_exactly(self, num_bytes: int, deadline: float | None) -> bytearray:
        content = bytearray(num_bytes)
        rest = memoryview(content)
        while rest:
            self._set_deadline(deadline)
            num_received = self._connection.recv_into(rest)
            if num_received == 0:
                raise ChannelError("the other end is gone")
            rest = rest[num_received:]
        return content


def _make_block(views: list[memoryview], num_bytes: int) -> int:
    """Written by the system, not through a mapping: no page is filled with zeros first."""
    descriptor = os.memfd_create("sensorium-block", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        rest = views
        offset = 0
        while offset < num_bytes:
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
        raise ChannelError("a block that is no sealed memory") from error
    if not is_sealed or os.fstat(descriptor).st_size != num_bytes:
        raise ChannelError("a block that is not what was said")
