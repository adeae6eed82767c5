"""Decodes JSON so that no single call keeps other threads waiting.

msgspec is fast, but holds the interpreter's lock while it decodes. On one core of a server 20 MB
take:

  a chat with one image in base64   12 ms   one call
  3 million token ids              140 ms   in slices
  400 thousand short messages      150 ms   in slices

So a text with few values is decoded at once, whatever its size; one with many is taken apart first,
without decoding it, and its small values are decoded many at a time. What can't be taken apart
cheaply is refused: millions of tiny values, or many of them far down, as each level is read again
at the next.

Values of msgpack are counted before they are made: a body of empty lists would take fifty times its
size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from sensorium.types.errors import RequestError

MAX_VALUES = 2_000_000
_MAX_VALUES_AT_ONCE = 50_000  # some ten milliseconds
_COUNT_BYTES = 2**20
_FLAT_SLICE_BYTES = 2**18
_BATCH_BYTES = 2**16  # of small values that are decoded together; the larger ones are taken apart
_MAX_DEPTH = 16  # of what is taken apart
_STRUCTURE = re.compile(rb'["\[{]')

Buffer = bytes | bytearray | memoryview


def decode_json(text: Buffer) -> Any:
    """Return the value of a JSON text. Raise a `RequestError` if it has too many values."""
    if _count_values(text) > MAX_VALUES:
        raise RequestError(f"the body has more than {MAX_VALUES} values")
    return _decode(text, _MAX_DEPTH)


def _decode(text: Buffer, max_depth: int) -> Any:
    kind = bytes(memoryview(text)[:64]).lstrip()[:1]
    if kind not in (b"{", b"[") or _count_values(text) <= _MAX_VALUES_AT_ONCE:
        return msgspec.json.decode(text)
    if max_depth == 0:
        raise RequestError(f"the body has many values more than {_MAX_DEPTH} levels down")
    if kind == b"{":
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        return dict(zip(fields, _decode_all(fields.values(), max_depth - 1), strict=True))
    if _is_flat(text):
        return _decode_flat(text)
    return _decode_all(msgspec.json.decode(text, type=list[msgspec.Raw]), max_depth - 1)


def _decode_all(raws: Iterable[msgspec.Raw], max_depth: int) -> list[Any]:
    values: list[Any] = []
    batch: list[bytes] = []
    num_bytes = 0
    for raw in raws:
        length = len(memoryview(raw))  # not kept: the garbage collector would follow them all
        if num_bytes + length > _BATCH_BYTES:
            values += _decode_batch(batch)
            batch, num_bytes = [], 0
        if length > _BATCH_BYTES:
            values.append(_decode(memoryview(raw), max_depth))
        else:
            batch.append(bytes(raw))
            num_bytes += length
    return values + _decode_batch(batch)


def _decode_batch(batch: list[bytes]) -> list[Any]:
    values: list[Any] = msgspec.json.decode(b"[" + b",".join(batch) + b"]")
    return values


def _count_values(text: Buffer) -> int:
    """Return a bound on the number of values, less one. Commas within strings count too."""
    view = memoryview(text)
    return sum(
        bytes(view[start : start + _COUNT_BYTES]).count(b",")
        for start in range(0, len(view), _COUNT_BYTES)
    )


def _is_flat(text: Buffer) -> bool:
    """Return whether a list holds nothing but numbers, true, false and null."""
    view = memoryview(text)
    start = bytes(view[:64]).index(b"[") + 1
    return _STRUCTURE.search(view, start) is None


def _decode_flat(text: Buffer) -> list[Any]:
    inner = bytes(text).strip()
    if not inner.endswith(b"]"):
        raise msgspec.DecodeError("Input data was truncated")
    values: list[Any] = []
    start, end = 1, len(inner) - 1
    while start <= end:
        stop = inner.find(b",", start + _FLAT_SLICE_BYTES, end)
        stop = end if stop < 0 else stop
        piece = msgspec.json.decode(b"[" + inner[start:stop] + b"]")
        if not piece:
            raise msgspec.DecodeError("JSON is malformed: trailing comma in array")
        values += piece
        start = stop + 1
    return values


# By first byte: how many bytes follow that say a length, and what that is the length of.
_SIZED = {
    **dict.fromkeys((0xC4, 0xC7, 0xD9), 1),
    **dict.fromkeys((0xC5, 0xC8, 0xDA, 0xDC, 0xDE), 2),
    **dict.fromkeys((0xC6, 0xC9, 0xDB, 0xDD, 0xDF), 4),
}
_EXTENSIONS = {0xC7, 0xC8, 0xC9}  # with one byte for their kind
_LISTS = {0xDC, 0xDD}
_MAPS = {0xDE, 0xDF}
# Numbers and extensions of a fixed size: how many bytes follow.
_FIXED = {
    **dict(zip((0xCA, 0xCB), (4, 8), strict=True)),
    **dict(zip(range(0xCC, 0xD0), (1, 2, 4, 8), strict=True)),
    **dict(zip(range(0xD0, 0xD4), (1, 2, 4, 8), strict=True)),
    **dict(zip(range(0xD4, 0xD9), (2, 3, 5, 9, 17), strict=True)),
}


def check_num_values(text: bytearray, limit: int) -> None:
    """Raise a `RequestError` if there are more values. The decoder refuses what is no msgpack."""
    if len(text) <= limit:  # each takes a byte at least
        return
    position = count = 0
    end = len(text)
    while position < end:
        count += 1
        if count > limit:
            raise RequestError(f"the body has more than {limit} values")
        position += _get_size(text, position)


def _get_size(text: bytearray, position: int) -> int:
    """Return the size of the value that begins here. Of a list or map, that of its head."""
    first = text[position]
    if 0xA0 <= first <= 0xBF:  # a short text
        return 1 + (first & 0x1F)
    if first in _FIXED:
        return 1 + _FIXED[first]
    num_bytes = _SIZED.get(first, 0)
    if num_bytes == 0 or first in _LISTS or first in _MAPS:
        return 1 + num_bytes
    length = int.from_bytes(text[position + 1 : position + 1 + num_bytes], "big")
    return 1 + num_bytes + (first in _EXTENSIONS) + length
