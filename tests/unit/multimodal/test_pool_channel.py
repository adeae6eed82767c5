"""The channel between the pool and a worker: what goes in comes out, and nonsense is refused."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from sensorium.multimodal.pool.channel import (
    MAX_FRAME_BYTES,
    MAX_INLINE_BYTES,
    Channel,
    ChannelError,
)

PREFIX = struct.Struct("<IIQ")
ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """A plain socket, for a peer that may say anything, and a channel. No descriptor is left."""
    num_descriptors = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    yield ours, channel
    ours.close()
    channel.close()
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors


def make_memory(num_bytes: int, seals: int = ALL_SEALS) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize("frame_bytes", [0, 5, 100_000])
@pytest.mark.parametrize("block_bytes", [0, 1, MAX_INLINE_BYTES, MAX_INLINE_BYTES + 1, 300_000])
def test_frames_and_blocks_arrive_as_they_were_sent(
    ends: tuple[socket.socket, Channel], frame_bytes: int, block_bytes: int
) -> None:
    generator = random.Random(frame_bytes + block_bytes)
    frame, block = generator.randbytes(frame_bytes), generator.randbytes(block_bytes)
    ours = Channel(ends[0])
    ours.send(frame, [block[: block_bytes // 2], block[block_bytes // 2 :]])
    received_frame, received_block = ends[1].receive(deadline=time.monotonic() + 60.0)
    assert received_frame == frame
    assert received_block == block
    assert not received_block.readonly
    del received_block


def test_messages_keep_their_order_and_their_blocks(ends: tuple[socket.socket, Channel]) -> None:
    ours = Channel(ends[0])
    for number in range(5):
        ours.send(b"%d" % number, [bytes([number]) * (number * 40_000)])
    for number in range(5):
        frame, block = ends[1].receive(deadline=time.monotonic() + 60.0)
        assert (frame, block) == (b"%d" % number, bytes([number]) * (number * 40_000))
        del block


def test_writes_of_the_receiver_do_not_reach_the_sender(
    ends: tuple[socket.socket, Channel],
) -> None:
    descriptor = make_memory(100_000)
    socket.send_fds(ends[0], [PREFIX.pack(0, 1, 100_000)], [descriptor])
    _, block = ends[1].receive(deadline=time.monotonic() + 60.0)
    block[:3] = b"abc"
    assert os.pread(descriptor, 3, 0) == bytes(3)
    os.close(descriptor)
    del block


@pytest.mark.parametrize(
    ("seals", "num_bytes", "num_said"),
    [
        (0, 100_000, 100_000),
        (fcntl.F_SEAL_GROW, 100_000, 100_000),  # could be made shorter under us
        (fcntl.F_SEAL_SHRINK, 100_000, 100_000),  # could be changed under us
        (ALL_SEALS, 100_000, 100_001),
        (ALL_SEALS, 100_000, 2**63),
        (ALL_SEALS, 0, 100_000),
    ],
)
def test_memory_that_is_too_small_or_unsealed_is_not_mapped(
    ends: tuple[socket.socket, Channel], seals: int, num_bytes: int, num_said: int
) -> None:
    descriptor = make_memory(num_bytes, seals)
    socket.send_fds(ends[0], [PREFIX.pack(0, 1, num_said)], [descriptor])
    os.close(descriptor)
    with pytest.raises(ChannelError):
        ends[1].receive(deadline=time.monotonic() + 60.0)


def test_a_descriptor_of_something_else_is_not_mapped(ends: tuple[socket.socket, Channel]) -> None:
    reader, writer = os.pipe()
    socket.send_fds(ends[0], [PREFIX.pack(0, 1, 100_000)], [reader])
    os.close(reader)
    os.close(writer)
    with pytest.raises(ChannelError):
        ends[1].receive(deadline=time.monotonic() + 60.0)


@pytest.mark.parametrize(
    ("prefix", "num_descriptors"),
    [
        (PREFIX.pack(0, 1, 100_000), 0),
        (PREFIX.pack(0, 0, 5), 1),
        (PREFIX.pack(0, 1, 100_000), 2),
        (PREFIX.pack(0, 7, 100_000), 1),
        (PREFIX.pack(MAX_FRAME_BYTES + 1, 0, 0), 0),
        (PREFIX.pack(0, 0, 2**40), 0),
        (PREFIX.pack(0, 0, 0)[:7], 0),
        (PREFIX.pack(9, 0, 0) + b"short", 0),
        (PREFIX.pack(9, 1, 100_000) + b"short", 1),
        (PREFIX.pack(0, 1, 100_000)[:7], 1),
        (b"", 0),
    ],
)
def test_nonsense_and_ends_are_errors_and_leave_no_descriptor(
    ends: tuple[socket.socket, Channel], prefix: bytes, num_descriptors: int
) -> None:
    descriptors = [make_memory(100_000) for _ in range(num_descriptors)]
    if descriptors:
        socket.send_fds(ends[0], [prefix], descriptors)
    else:
        ends[0].sendall(prefix)
    for descriptor in descriptors:
        os.close(descriptor)
    ends[0].close()
    with pytest.raises(ChannelError):
        ends[1].receive(deadline=time.monotonic() + 60.0)


def test_a_trickling_peer_can_not_extend_the_deadline(
    ends: tuple[socket.socket, Channel],
) -> None:
    ends[0].sendall(PREFIX.pack(100, 0, 0) + b"a few")
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        ends[1].receive(deadline=start + 0.05)
    assert time.monotonic() - start < 60.0
    with pytest.raises(TimeoutError):
        ends[1].receive(deadline=start)


def test_a_frame_that_the_peer_would_refuse_is_not_sent(
    ends: tuple[socket.socket, Channel],
) -> None:
    with pytest.raises(ValueError, match="are allowed"):
        ends[1].send(bytes(MAX_FRAME_BYTES + 1))
    assert not Channel(ends[0]).is_readable(0.0)
