"""How many files, and so how many connections, a process may have open."""

from __future__ import annotations

import resource

_MOST_FILES = 65_536  # more than any frontend serves; each one costs the kernel memory
_RESERVED_FILES = 1024  # for what is no connection: pipes, shared memory, media that is fetched


def raise_file_limit() -> int:
    """Allow this process as many files as the system lets it have, within reason. Return how many
    of them may be connections of clients.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    limit = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    return max(limit - _RESERVED_FILES, limit // 2)
