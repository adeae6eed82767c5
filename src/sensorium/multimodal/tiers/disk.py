"""Entries as files in one directory, which several servers of a machine may share.

A file is written under another name and then renamed, so that it is there as a whole or not at all.
It begins with a checksum of its content and of its name. A file that fails the check is removed and
counts as absent: readers need no lock.

All writers share one number, the bytes that are taken, in a file that is locked while it is
changed. A writer takes its room by making its file as long as the entry, under that lock. When an
entry does not fit, the files are listed and the least recently used are removed, and so are those
of dead writers: a living one holds a lock on its file. The list also corrects the number, which is
too high after a writer was killed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from sensorium.multimodal.tiers.interface import StoreStatistics
from sensorium.types.errors import ModelError

logger = logging.getLogger(__name__)
_MAGIC = b"sensorium entry1"
_HEAD_BYTES = 64  # the magic, the checksum, zeros; what follows is aligned for tensors
_CHECKSUM_BYTES = 32
_TAKEN = "taken"  # the file with the number of bytes that are taken, and the writers' lock
_UNFINISHED = "unfinished-"  # the beginning of the names of files that are being written
_ROOM_SHARE = 0.1  # of the capacity, which is made free when an entry does not fit
_PAUSE_S = 30.0  # for which nothing is written after an error of the disk


class DiskStore:
    """A store of named bytes in a directory, with a limit on the bytes that it takes.

    Several processes may use the same directory, with different limits too: each keeps its own.
    Several threads may use one store.
    """

    level = "disk"

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        """Create the directory if it is missing, readable for its owner only.

        Raise `ModelError` if it can't be used.
        """
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._paused_until = 0.0
        self._counts = StoreStatistics(capacity_bytes=capacity_bytes)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked() as lock:  # what killed writers have left is removed
                self._write_taken(lock, self._shrink(capacity_bytes))
        except OSError as error:
            raise ModelError(
                f"the directory for the disk cache of media, {str(directory)!r}, can't be used: "
                f"{error.strerror or error}"
            ) from error

    def get(self, name: str) -> bytearray | None:
        """Return the content of an entry, or None if it is absent or damaged.

        A damaged entry is removed.
        """
        path = self._get_path(name)
        self._counts.num_queries += 1
        try:
            content = _read(path, name)
        except FileNotFoundError:
            return None
        except _DamagedError:
            self._counts.num_damaged += 1
            logger.warning("the entry %s of the disk cache was damaged, and is removed", path)
            self._remove(path)
            return None
        except OSError as error:
            self._note_error("read from", error)
            return None
        self._counts.num_hits += 1
        return content

    def has(self, name: str) -> bool:
        """Return whether there is an entry of this name, which may be damaged."""
        return self._get_path(name).exists()

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Write an entry, if it fits and is not there yet, and return whether it was written."""
        path = self._get_path(name)
        num_bytes = _HEAD_BYTES + sum(len(part) for part in parts)
        if time.monotonic() < self._paused_until or path.exists():
            return False
        if num_bytes > self._capacity_bytes:
            self._counts.num_oversize += 1
            return False
        unfinished = self._directory / f"{_UNFINISHED}{uuid4().hex}"
        try:
            with open(self._reserve(unfinished, num_bytes), "wb") as writer:
                try:
                    writer.write(_make_head(name, parts))
                    for part in parts:
                        writer.write(part)
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    writer.flush()
                    unfinished.rename(path)
                except BaseException:
                    self._remove(unfinished)
                    raise
        except OSError as error:
            self._note_error("write to", error)
            return False
        self._counts.num_writes += 1
        return True

    def remove(self, name: str) -> None:
        self._remove(self._get_path(name))

    def statistics(self) -> StoreStatistics:
        """Return the counts of this process, and the bytes that all writers together have taken."""
        try:
            taken = int((self._directory / _TAKEN).read_bytes())
        except (OSError, ValueError):
            taken = 0
        return replace(self._counts, num_bytes=taken)

    def close(self) -> None:
        """Do nothing: files need no connection."""

    # ---- room

    def _reserve(self, unfinished: Path, num_bytes: int) -> int:
        """Make a file of this size, and remove the least recently used entries if it has no room.

        Returns its descriptor, which holds a lock on it.
        """
        with self._locked() as lock:
            taken = self._read_taken(lock)
            if taken is None or taken + num_bytes > self._capacity_bytes:
                share = int((1 - _ROOM_SHARE) * self._capacity_bytes)
                taken = self._shrink(min(self._capacity_bytes - num_bytes, share))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.open(unfinished, flags, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.truncate(file, num_bytes)
                self._write_taken(lock, taken + num_bytes)
            except BaseException:
                os.close(file)
                unfinished.unlink(missing_ok=True)
                raise
            return file

    def _shrink(self, wanted_bytes: int) -> int:
        """Remove the least recently used files until `wanted_bytes` are left; return what is left.

        Files that are being written stay. Those of dead writers go.
        """
        files = sorted(self._list_files())
        left = sum(num_bytes for _, num_bytes, _ in files)
        for _, num_bytes, path in files:
            is_unfinished = path.name.startswith(_UNFINISHED)
            if _is_locked(path) if is_unfinished else left <= wanted_bytes:
                continue
            with suppress(FileNotFoundError):  # another reader may have found it damaged
                path.unlink()
            self._counts.num_evictions += not is_unfinished
            left -= num_bytes
        return left

    def _sum_up(self) -> int:
        return sum(num_bytes for _, num_bytes, _ in self._list_files())

    def _list_files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield when each file was used, its size and its path."""
        for folder in (self._directory, *self._directory.glob("[0-9a-f][0-9a-f]")):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode) and entry.name != _TAKEN:
                        yield found.st_mtime, found.st_size, Path(entry.path)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the writers' lock, and give the descriptor of the file with the taken bytes."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self._directory / _TAKEN, flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    @staticmethod
    def _read_taken(lock: int) -> int | None:
        try:
            taken = int(os.pread(lock, 32, 0))
        except ValueError:  # new, or damaged
            return None
        return None if taken < 0 else taken

    @staticmethod
    def _write_taken(lock: int, num_bytes: int) -> None:
        os.pwrite(lock, f"{max(0, num_bytes):<32}".encode(), 0)

    def _change_taken(self, num_bytes: int) -> None:
        with suppress(OSError), self._locked() as lock:
            self._write_taken(lock, (self._read_taken(lock) or 0) + num_bytes)

    # ---- files

    def _get_path(self, name: str) -> Path:
        return self._directory / name[:2] / name

    def _remove(self, path: Path) -> None:
        try:
            num_bytes = path.stat().st_size
            path.unlink()
        except OSError:  # another process has removed it, or no file can be removed
            return
        self._change_taken(-num_bytes)

    def _note_error(self, deed: str, error: OSError) -> None:
        self._counts.num_errors += 1
        is_new = time.monotonic() >= self._paused_until
        self._paused_until = time.monotonic() + _PAUSE_S
        if is_new:
            logger.warning(
                "can't %s the disk cache of media in %s: %s. Requests go on without it.",
                deed,
                self._directory,
                error.strerror or error,
            )


class _DamagedError(Exception):
    """A file is not what was written under its name."""


def _read(path: Path, name: str) -> bytearray:
    """Return the content of a file, and mark the file as used."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link, which nothing here has made
            raise _DamagedError from error
        raise
    with open(file, "rb", buffering=0) as reader:
        num_bytes = os.fstat(file).st_size - _HEAD_BYTES
        head = reader.read(_HEAD_BYTES)
        content = bytearray(max(0, num_bytes))
        if num_bytes < 0 or _read_into(reader, content) != num_bytes:
            raise _DamagedError
        if head != _make_head(name, [content]):
            raise _DamagedError
        with suppress(OSError):  # a directory that can only be read serves all the same
            os.utime(file)
    return content


def _read_into(reader: object, content: bytearray) -> int:
    view = memoryview(content)
    count = 0
    while count < len(view):
        num_read = reader.readinto(view[count:])  # type: ignore[attr-defined]
        if not num_read:
            break
        count += num_read
    return count


def _is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on a file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True  # it was finished just now
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _make_head(name: str, parts: Sequence[bytes | bytearray | memoryview]) -> bytes:
    digest = hashlib.blake2b(name.encode(), digest_size=_CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return (_MAGIC + digest.digest()).ljust(_HEAD_BYTES, b"\0")
