"""The head of an entry: its first bytes, by which stores recognise damaged or misplaced entries.

The head has the length of the entry. If that is not the actual length, a store reads no more than
the head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_MAGIC = b"sensorium entry2"
_LENGTH_BYTES = 8
_CHECKSUM_BYTES = 32
HEAD_BYTES = 64  # the magic, the length, the checksum, zeros; what follows is aligned for tensors
MAX_ENTRY_BYTES = 2**29  # of an entry with its head: Redis takes no longer strings


def make_head(name: str, parts: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Return the head of the entry with this name and this content, given in parts."""
    digest = hashlib.blake2b(name.encode(), digest_size=_CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    length = sum(len(part) for part in parts).to_bytes(_LENGTH_BYTES, "little")
    return (_MAGIC + length + digest.digest()).ljust(HEAD_BYTES, b"\0")


def may_begin(head: bytes, num_bytes: int) -> bool:
    """Return whether this may be the head of an entry of `num_bytes`, the head included."""
    length = (num_bytes - HEAD_BYTES).to_bytes(_LENGTH_BYTES, "little", signed=True)
    return len(head) == HEAD_BYTES and head.startswith(_MAGIC + length)
