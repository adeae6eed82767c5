"""Shared memory with a mutex and memberships of the kernel."""

from __future__ import annotations

import os
import threading

import pytest

from sensorium.multimodal.cache import shm_memory
from sensorium.multimodal.cache.shm_memory import ShmSegment
from sensorium.types.errors import CapacityError, InvariantError, ModelError


def create(num_bytes: int) -> ShmSegment:
    """Return a segment that is wholly reserved."""
    return ShmSegment.create(num_bytes, reserved_bytes=num_bytes)


def get_resident_bytes(segment: ShmSegment) -> int:
    return os.fstat(segment.fd).st_blocks * 512


def fail(*_: int) -> None:
    raise OSError(28, "No space left on device")


def close(*segments: ShmSegment) -> None:
    for segment in segments:
        with segment:
            segment.close()


def test_what_one_instance_writes_the_other_reads() -> None:
    first = create(8192)
    second = ShmSegment.attach(first.fd)
    first.buffer[8000:8003] = b"abc"
    assert bytes(second.buffer[8000:8003]) == b"abc"
    close(first, second)


def test_memory_outlives_its_creator() -> None:
    first = create(4096)
    first.buffer[0:1] = b"x"
    second = ShmSegment.attach(first.fd)
    close(first)
    assert bytes(second.buffer[0:1]) == b"x"
    close(second)


def test_a_failed_reservation_is_an_error_at_the_start_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError, match="can't reserve 4096 bytes: No space left"):
        create(4096)
    assert len(os.listdir("/proc/self/fd")) <= num_open


def test_memory_is_really_reserved_and_can_not_be_cut_off() -> None:
    segment = create(1 << 20)
    assert get_resident_bytes(segment) >= 1 << 20
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 2 << 20)
    close(segment)


def test_what_is_not_reserved_takes_no_memory_in_any_process() -> None:
    segment = ShmSegment.create(64 << 20, reserved_bytes=4096)
    other = ShmSegment.attach(segment.fd)
    assert get_resident_bytes(segment) == 4096
    segment.buffer[10:13] = b"abc"
    assert segment.reserve(1 << 20, 3 << 20)
    assert get_resident_bytes(segment) == 4096 + (2 << 20)
    assert segment.reserve(0, 3 << 20)
    assert get_resident_bytes(segment) == 3 << 20
    assert bytes(other.buffer[10:13]) == b"abc"
    close(segment, other)


def test_the_system_keeps_some_memory_for_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    segment = ShmSegment.create(64 << 20, reserved_bytes=4096)
    monkeypatch.setattr(shm_memory, "get_free_system_bytes", lambda: 257 << 20)
    assert segment.reserve(1 << 20, 2 << 20)
    assert not segment.reserve(2 << 20, 4 << 20)
    assert not segment.reserve(2 << 20, 4 << 20)
    assert get_resident_bytes(segment) == 4096 + (1 << 20)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "stays at 2 MiB for now, because the system has only 257 MiB available" in line
    close(segment)


def test_a_reservation_that_fails_later_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = ShmSegment.create(64 << 20, reserved_bytes=4096)
    monkeypatch.setattr(os, "posix_fallocate", fail)
    assert not segment.reserve(4096, 8192)
    close(segment)


def test_the_mutex_excludes_other_instances_and_threads() -> None:
    first = create(4096)
    second = ShmSegment.attach(first.fd)
    entered = threading.Event()

    def enter(segment: ShmSegment) -> None:
        with segment:
            entered.set()

    for segment in (first, second):
        entered.clear()
        with first:
            thread = threading.Thread(target=enter, args=(segment,))
            thread.start()
            assert not entered.wait(0.05)
        assert entered.wait(60)
        thread.join()
    close(first, second)


def test_numbers_of_members_are_unique_and_free_again_after_close() -> None:
    first = create(4096)
    second, third = ShmSegment.attach(first.fd), ShmSegment.attach(first.fd)
    assert [first.join(2), second.join(2)] == [0, 1]
    with pytest.raises(CapacityError, match="2 processes"):
        third.join(2)
    assert third.is_member(0)
    close(first)
    assert not third.is_member(0)
    assert third.join(2) == 0
    close(second, third)


def test_a_descriptor_for_children_carries_no_lock() -> None:
    """A child that holds it must not keep the locks of a dead parent."""
    first = create(4096)
    second = ShmSegment.attach(first.fd)
    first.join(2)
    inherited = os.dup(first.fd)
    close(first)
    assert not second.is_member(0)
    with second:
        pass
    os.close(inherited)
    close(second)


def test_a_closed_segment_can_not_be_entered() -> None:
    segment = create(4096)
    close(segment)
    with pytest.raises(InvariantError, match="closed"), segment:
        pass
