"""A store of entries as files in one directory, which several servers of a machine may share.

A file is written under a temporary name and then renamed, so that it exists as a whole or not at
all. It begins with a checksum of its content and its name. A file that fails the check is removed
and counts as absent: readers need no lock. Files with names of another form are never touched.

All writers share the number of bytes that all files take, in a file that is locked while it is
changed. A writer reserves room under that lock, by making its file as long as the entry. When an
entry does not fit, the files are listed, and the least recently used are removed, and so are
unfinished files of dead writers: a living writer holds a lock on its file. The list also corrects
the number, which is too high after a writer was killed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from uuid import uuid4

from sensorium.multimodal.tiers.heads import (
    HEAD_BYTES,
    MAX_ENTRY_BYTES,
    make_head,
    may_begin,
)
from sensorium.multimodal.tiers.interface import StoreStatistics
from sensorium.types.errors import ModelError

logger = logging.getLogger(__name__)
_TAKEN = "taken"  # the file with the number of bytes that are taken, and the writers' lock
_COUNT_BYTES = 32  # the size of that file
_COUNT = re.compile(rb"[0-9]{1,18} *")  # its whole content: more digits than any disk needs
_ENTRY = ".entry"  # the end of the names of all entries
_UNFINISHED = re.compile(r"unfinished-[0-9a-f]{32}")  # files that are being written
_FOLDER = re.compile(r"[0-9a-f]{2}")
_ROOM_SHARE = 0.1  # of the capacity, which is made free when an entry does not fit
_PAUSE_S = 30.0  # for which nothing is written after an error of the disk
_LOCK_S = 5.0  # how long a writer waits for the others
_LOCK_POLL_S = 0.005
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe must not wait
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_FoundFile = tuple[float, int, Path]  # when it was used, its size, its path


class DiskStore:
    """A thread-safe store of named bytes in a directory, with a limit on the bytes that it holds.

    Several processes may use the same directory, each with a limit of its own.
    """

    level = "disk"

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        """Create the directory if it is missing, readable for its owner only.

        Files that killed writers left are removed, and so are entries beyond the capacity. If
        another process holds the lock for long, they are removed later, when the first entry does
        not fit. Raise `ModelError` if the directory can't be used.
        """
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._paused_until = 0.0
        self._counts = StoreStatistics(capacity_bytes=capacity_bytes)
        try:
            with self._locked() as lock:
                self._write_taken(lock, self._shrink(capacity_bytes))
        except TimeoutError:  # all processes of a server list a large directory when they start
            logger.info("the disk cache of media in %s is in use, and not checked now", directory)
        except OSError as error:
            raise ModelError(
                f"the directory for the disk cache of media, {str(directory)!r}, can't be used: "
                f"{error.strerror or error}"
            ) from error

    def get(self, name: str, max_bytes: int = MAX_ENTRY_BYTES) -> bytearray | None:
        path = self._get_path(name)
        self._counts.num_queries += 1
        try:
            content = _read(path, name, max_bytes)
        except FileNotFoundError:
            return None
        except _DamagedError:
            self.remove(name, is_damaged=True)
            return None
        except OSError as error:
            self._counts.num_errors += 1
            logger.debug("can't read %s: %s", path, error)
            return None
        self._counts.num_hits += 1
        return content

    def has(self, name: str) -> bool:
        """Return True if there is an entry of this name, intact or not; False on a disk error."""
        return _exists(self._get_path(name))

    def touch(self, name: str) -> None:
        with suppress(OSError):
            os.utime(self._get_path(name), follow_symlinks=False)

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        path = self._get_path(name)
        num_bytes = HEAD_BYTES + sum(len(part) for part in parts)
        if time.monotonic() < self._paused_until or _exists(path):
            return False
        try:
            return self._write(path, name, parts, num_bytes)
        except OSError as error:
            self._note_error(error)
            return False

    def _write(
        self, path: Path, name: str, parts: Sequence[bytes | memoryview], num_bytes: int
    ) -> bool:
        unfinished = self._directory / f"unfinished-{uuid4().hex}"
        file = self._reserve(unfinished, num_bytes)
        if file is None:
            self._counts.num_oversize += 1
            return False
        with open(file, "wb") as writer:
            try:
                writer.write(make_head(name, parts))
                for part in parts:
                    writer.write(part)
                writer.flush()
                path.parent.mkdir(mode=0o700, exist_ok=True)
                unfinished.rename(path)
            except BaseException:
                self._remove(unfinished)
                raise
        self._counts.num_writes += 1
        return True

    def remove(self, name: str, *, is_damaged: bool = False) -> None:
        path = self._get_path(name)
        if is_damaged:
            self._counts.num_damaged += 1
            logger.warning("the entry %s of the disk cache was damaged, and is removed", path)
        self._remove(path)

    def statistics(self) -> StoreStatistics:
        """Return the counts of this process, and the bytes that all writers together have taken.

        If the number on disk is damaged, 0 is returned. The next writer computes it again.
        """
        taken = None
        with suppress(OSError):
            file = os.open(self._directory / _TAKEN, _READ)
            try:
                taken = self._read_taken(file)
            finally:
                os.close(file)
        return replace(self._counts, num_bytes=taken or 0)

    def close(self) -> None:
        """Do nothing: files need no connection."""

    # ---- room

    def _reserve(self, unfinished: Path, num_bytes: int) -> int | None:
        """Make a file of this size, and return its descriptor, which holds a lock on it.

        If the file does not fit, the least recently used entries are removed. Return None if that
        is not enough.
        """
        if num_bytes > min(self._capacity_bytes, MAX_ENTRY_BYTES):
            return None
        with self._locked() as lock:
            taken = self._read_taken(lock)
            if taken is None or taken + num_bytes > self._capacity_bytes:
                share = int((1 - _ROOM_SHARE) * self._capacity_bytes)
                taken = self._shrink(min(self._capacity_bytes - num_bytes, share))
                self._write_taken(lock, taken)
            if taken + num_bytes > self._capacity_bytes:  # unfinished files of others take the room
                return None
            file = os.open(unfinished, _CREATE, 0o600)
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
        """Remove the least recently used files until at most `wanted_bytes` remain.

        Return the bytes that remain. Files that are being written stay, but not those of dead
        writers.
        """
        files = sorted(self._list_files())
        left = sum(num_bytes for _, num_bytes, _ in files)
        for _, num_bytes, path in files:
            is_unfinished = path.suffix != _ENTRY
            if _is_locked(path) if is_unfinished else left <= wanted_bytes:
                continue
            with suppress(FileNotFoundError):  # another reader may have found it damaged
                path.unlink()
            self._counts.num_evictions += not is_unfinished
            left -= num_bytes
        return left

    def _list_files(self) -> Iterator[_FoundFile]:
        """Yield the entries and the unfinished files, but no other files of the directory."""
        for entry in os.scandir(self._directory):
            if _UNFINISHED.fullmatch(entry.name):
                yield from _describe(entry)
            elif _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError), os.scandir(entry.path) as inner:
                    for each in inner:
                        if each.name.endswith(_ENTRY) and each.name.startswith(entry.name):
                            yield from _describe(each)

    @contextmanager
    def _locked(self, seconds: float | None = None) -> Iterator[int]:
        """Hold the writers' lock, and give its descriptor; raise `TimeoutError` if it is busy."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _open_count(self._directory / _TAKEN)
        try:
            _lock(lock, _LOCK_S if seconds is None else seconds)
            try:
                yield lock
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a forked process may also have the descriptor
        finally:
            os.close(lock)

    @staticmethod
    def _read_taken(lock: int) -> int | None:
        """Return the number of bytes that are taken, or None if the file is new or damaged."""
        content = os.pread(lock, _COUNT_BYTES + 1, 0)
        is_whole = len(content) <= _COUNT_BYTES and _COUNT.fullmatch(content)
        return int(content) if is_whole else None

    @staticmethod
    def _write_taken(lock: int, num_bytes: int) -> None:
        os.pwrite(lock, f"{max(0, num_bytes):<{_COUNT_BYTES}}".encode(), 0)
        if os.fstat(lock).st_size != _COUNT_BYTES:  # it was damaged
            os.truncate(lock, _COUNT_BYTES)

    # ---- files

    def _get_path(self, name: str) -> Path:
        return self._directory / name[:2] / f"{name}{_ENTRY}"

    def _remove(self, path: Path) -> None:
        """Remove a file, and count its bytes as free.

        If another writer holds the lock, the next list of the files corrects the count.
        """
        with suppress(OSError):  # another process has removed it, or it can't be removed
            num_bytes = path.lstat().st_size
            path.unlink()
            with self._locked(seconds=0.0) as lock:
                taken = self._read_taken(lock)
                if taken is not None:  # else the next writer of an entry computes it again
                    self._write_taken(lock, taken - num_bytes)

    def _note_error(self, error: OSError) -> None:
        self._counts.num_errors += 1
        self._paused_until = time.monotonic() + _PAUSE_S
        logger.warning(
            "can't write to the disk cache of media in %s: %s. Requests continue without it.",
            self._directory,
            error.strerror or error,
        )


class _DamagedError(Exception):
    """A file does not have the content that was written under its name."""


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except OSError:  # `Path.exists` raises errors of the disk
        return False
    return True


def _describe(entry: os.DirEntry[str]) -> Iterator[_FoundFile]:
    with suppress(FileNotFoundError):
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            yield found.st_mtime, found.st_size, Path(entry.path)


def _open_count(path: Path) -> int:
    """Open the file with the number of bytes, and make it if something else is in its place."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for _ in range(2):
        try:
            file = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
        else:
            if stat.S_ISREG(os.fstat(file).st_mode):
                return file
            os.close(file)
        # A link, a pipe, a socket or a folder, which nothing here has made.
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    raise OSError(errno.EBUSY, "the file with its size can't be made")


def _lock(file: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock") from error
        time.sleep(_LOCK_POLL_S)


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, _READ)
    except OSError:
        return True  # it was finished just now, or it is another user's
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _read(path: Path, name: str, max_bytes: int) -> bytearray:
    """Return the content of a file, and mark the file as used."""
    try:
        file = os.open(path, _READ)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link, which nothing here has made
            raise _DamagedError from error
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or not HEAD_BYTES <= found.st_size <= max_bytes:
            raise _DamagedError
        head = os.read(file, HEAD_BYTES)
        if not may_begin(head, found.st_size):
            raise _DamagedError
        content = bytearray(found.st_size - HEAD_BYTES)
        if _read_into(file, content) != len(content) or head != make_head(name, [content]):
            raise _DamagedError
        with suppress(OSError):  # this fails in a read-only directory, which can still be used
            os.utime(file)
    finally:
        os.close(file)
    return content


def _read_into(file: int, content: bytearray) -> int:
    view, count = memoryview(content), 0
    with closing(FileIO(file, closefd=False)) as reader:
        while count < len(view) and (num_read := reader.readinto(view[count:])):
            count += num_read
    return count
