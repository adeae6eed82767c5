"""The first bytes of an entry, by which every store recognises what was damaged or misplaced."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

_MAGIC = b"sensorium entry1"
_CHECKSUM_BYTES = 32
HEAD_BYTES = 64  # the magic, the checksum, zeros; what follows is aligned for tensors


def make_head(name: str, parts: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Return the head of the entry with this name and this content, given in parts."""
    digest = hashlib.blake2b(name.encode(), digest_size=_CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return (_MAGIC + digest.digest()).ljust(HEAD_BYTES, b"\0")
