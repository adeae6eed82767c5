"""Tells the C library's allocator how a frontend uses memory."""

from __future__ import annotations

import ctypes

# Of malloc.h.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 2**20
_MAX_ARENAS = 2


def keep_memory_compact() -> None:
    """Bodies and media come and go by the megabyte, in many threads. Left alone, glibc raises the
    size from which it asks the system for memory up to 32 MiB, and has arenas for every thread:
    what is freed stays in their gaps, hundreds of megabytes of it. Other libraries know no such
    call, and need none.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)
