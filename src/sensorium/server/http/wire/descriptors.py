"""Sets the limit on a process's connections, from its limit on open files."""

from __future__ import annotations

import resource

_MOST_FILES = 65_536  # more than any frontend serves; each one costs the kernel memory
_RESERVED_FILES = 1024  # for other files than connections: pipes, shared memory, media hosts


def raise_file_limit() -> int:
    """Raise the limit on open files to the permitted one, and return the limit on connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    limit = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return max(limit - _RESERVED_FILES, limit // 2)
