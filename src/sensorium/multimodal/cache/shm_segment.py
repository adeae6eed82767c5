"""Memory that processes share, a mutex over it, and who is alive: all three kept by the kernel.

The memory is an anonymous file (`memfd_create`). It has no name, so nothing can be left behind: it
goes with the last process that holds it. Other processes get its descriptor by inheritance.

Invariants:
  1. Every byte is reserved and mapped before the first use, and the size is sealed: no access can
     end in a SIGBUS.
  2. A process that dies in any way gives up the mutex and its membership in that moment, after the
     last of its threads has stopped writing: both are locks of an open file.
  3. Locks hang on a file description that is never handed to another process. It must not be
     forked either: a child that lives on without `exec` would keep its parent's locks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys
import threading
from types import TracebackType

from sensorium.types.errors import CapacityError, InvariantError, ModelError
from sensorium.utils.system_memory import get_free_system_bytes

# struct flock of 64-bit Linux: type, whence, start, length, pid, padding.
_FLOCK = struct.Struct("@hhqqi0q")


class ShmSegment:
    """One process's (or one instance's) hold on the memory. `with segment:` is the mutex; inside
    one process it also keeps threads apart. `fd` is for child processes (`pass_fds`).
    """

    def __init__(self, fd: int) -> None:
        """Takes over `fd`."""
        self.fd = fd
        # A description of its own: locks belong to the description, not to the process.
        self._lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._thread_lock = threading.Lock()
        self._is_closed = False
        self.buffer = memoryview(
            mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        )

    @classmethod
    def create(cls, num_bytes: int) -> ShmSegment:
        """Zeros. A `ModelError` if the system has no room for them."""
        if sys.platform != "linux":
            raise ModelError("the shared-memory cache needs Linux: use the lru cache")
        free_bytes = get_free_system_bytes()
        if num_bytes > free_bytes:
            raise ModelError(
                f"the shared-memory cache needs {num_bytes / 2**30:.1f} GiB, and the system has "
                f"{free_bytes / 2**30:.1f} GiB available: give a smaller mm_processor_cache_gb"
            )
        fd = os.memfd_create("sensorium", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd)
        except OSError as error:
            os.close(fd)
            raise ModelError(
                f"the shared-memory cache can't reserve {num_bytes} bytes: {error.strerror}"
            ) from error

    @classmethod
    def attach(cls, fd: int) -> ShmSegment:
        """The memory behind an inherited descriptor, which stays the caller's."""
        return cls(os.dup(fd))

    def __enter__(self) -> None:
        self._thread_lock.acquire()
        try:
            if self._is_closed:
                raise InvariantError("the shared memory is closed")
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        except BaseException:
            self._thread_lock.release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_closed:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        self._thread_lock.release()

    def join(self, max_members: int) -> int:
        """A number below `max_members` that no other living instance has. Inside the mutex."""
        for member in range(max_members):
            try:
                fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, _describe(fcntl.F_WRLCK, member))
            except BlockingIOError:
                continue
            return member
        raise CapacityError(f"the shared memory has {max_members} members already")

    def is_member(self, member: int) -> bool:
        """Whether another instance that is alive has this number."""
        found = fcntl.fcntl(self._lock_fd, fcntl.F_OFD_GETLK, _describe(fcntl.F_WRLCK, member))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Inside the mutex. Views of the buffer stay usable, and the memory with them."""
        self._is_closed = True
        os.close(self._lock_fd)
        os.close(self.fd)


def _describe(kind: int, member: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, member, 1, 0)
