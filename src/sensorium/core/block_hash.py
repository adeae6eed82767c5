"""Names for full KV blocks: equal names mean equal keys and values.

A name chains over everything that the block's keys and values depend on: the adapter and salt,
whether they were computed for a long request, all tokens up to the block's end, and which part of
which media item stands at each place.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

_VERSION = b"sensorium-kv-1"


def hash_root(*, adapter: str | None, cache_salt: str | None, is_long: bool = False) -> bytes:
    """Return the parent of a request's first block.

    With `is_long` the request is computed as one of more than `Limits.long_after` tokens.
    """
    variant = b"long" if is_long else b""
    return hashlib.sha256(_VERSION + _framed(adapter) + _framed(cache_salt) + variant).digest()


def hash_block(
    parent: bytes, token_ids: Sequence[int], mm_items: Sequence[tuple[str, int]]
) -> bytes:
    """Return the name of the block that follows `parent`.

    `mm_items` has `(mm_hash, offset relative to the block)` for each item that overlaps the block.
    """
    digest = hashlib.sha256(parent)
    digest.update(struct.pack("<q", len(token_ids)))
    digest.update(array("q", token_ids).tobytes())
    for mm_hash, offset in mm_items:
        digest.update(_framed(mm_hash) + struct.pack("<q", offset))
    return digest.digest()


def _framed(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    encoded = text.encode(errors="surrogatepass")  # JSON allows lone surrogates
    return b"\x01" + struct.pack("<q", len(encoded)) + encoded
