"""Decodes JSON so that no single call keeps other threads waiting.

msgspec is fast, but holds the interpreter's lock while it decodes. On one core of a server, 20 MB
of chat with one image in base64 are decoded at once, in 12 ms; 20 MB of token ids (3 million) take
140 ms and 20 MB of short messages (400 thousand) 150 ms, in slices. So a text with few values is
decoded at once, whatever its size. One with many is first split into its fields or entries, without
decoding these; then small ones are decoded many at a time, and large ones are split again. Texts
that would be slow to split are refused: those with millions of values, and those with many values
at a great depth, since each level reads the text again.

Values of msgpack are counted before they are decoded, because a body of empty lists would take
fifty times its size in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from sensorium.types.errors import RequestError

MAX_VALUES = 2_000_000
_MAX_VALUES_AT_ONCE = 50_000  # decoded in about ten milliseconds
_COUNT_BYTES = 2**20
_FLAT_SLICE_BYTES = 2**18
_BATCH_BYTES = 2**16  # of values that are decoded together; larger values are split
_MAX_DEPTH = 16  # levels that are split
_STRUCTURE = re.compile(rb'["\[{]')

Buffer = bytes | bytearray | memoryview


def decode_json(text: Buffer) -> Any:
    """Return the value of a JSON text, without blocking other threads for long.

    Raise a `RequestError` if it has too many values, and a `msgspec.DecodeError` if it is not JSON.
    """
    num_values = _count_values(text)
    if num_values > MAX_VALUES:
        raise RequestError(f"the body has more than {MAX_VALUES} values, which is the limit")
    return _decode(text, num_values, _MAX_DEPTH)


def _decode(text: Buffer, num_values: int, max_depth: int) -> Any:
    kind = bytes(memoryview(text)[:64]).lstrip()[:1]
    if kind not in (b"{", b"[") or num_values <= _MAX_VALUES_AT_ONCE:
        return msgspec.json.decode(text)
    if max_depth == 0:
        raise RequestError(f"the body has too many values nested over {_MAX_DEPTH} levels deep")
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
        # The view is not kept, because the garbage collector would follow all views.
        length = len(memoryview(raw))
        if num_bytes + length > _BATCH_BYTES:
            values += _decode_batch(batch)
            batch, num_bytes = [], 0
        if length > _BATCH_BYTES:
            inner = memoryview(raw)  # not a copy, as each level would keep one of its content
            values.append(_decode(inner, _count_values(inner), max_depth))
        else:
            batch.append(bytes(raw))
            num_bytes += length
    return values + _decode_batch(batch)


def _decode_batch(batch: list[bytes]) -> list[Any]:
    values: list[Any] = msgspec.json.decode(b"[" + b",".join(batch) + b"]")
    return values


def _count_values(text: Buffer) -> int:
    """Return the number of commas in a JSON text, also in strings: a bound on the number of values.

    A text with n commas has at most n + 1 values, not counting lists and objects that hold others.
    """
    starts = range(0, len(text), _COUNT_BYTES)
    if isinstance(text, memoryview):
        return sum(bytes(text[start : start + _COUNT_BYTES]).count(b",") for start in starts)
    return sum(text.count(b",", start, start + _COUNT_BYTES) for start in starts)


def _is_flat(text: Buffer) -> bool:
    """Return whether a JSON list holds only numbers, true, false and null."""
    view = memoryview(text)
    start = bytes(view[:64]).index(b"[") + 1
    return _STRUCTURE.search(view, start) is None


def _decode_flat(text: Buffer) -> list[Any]:
    inner = bytes(text).strip()
    if not inner.endswith(b"]"):
        raise msgspec.DecodeError("a list does not end with ]")
    values: list[Any] = []
    start, end = 1, len(inner) - 1
    while start <= end:
        stop = inner.find(b",", start + _FLAT_SLICE_BYTES, end)
        stop = end if stop < 0 else stop
        piece = msgspec.json.decode(b"[" + inner[start:stop] + b"]")
        if not piece:
            raise msgspec.DecodeError("a list has a comma after its last value")
        values += piece
        start = stop + 1
    return values


# first byte of a value -> how many bytes follow that encode its length
_SIZED = {
    **dict.fromkeys((0xC4, 0xC7, 0xD9), 1),
    **dict.fromkeys((0xC5, 0xC8, 0xDA, 0xDC, 0xDE), 2),
    **dict.fromkeys((0xC6, 0xC9, 0xDB, 0xDD, 0xDF), 4),
}
_EXTENSIONS = {0xC7, 0xC8, 0xC9}  # they have one more byte, for their kind
_LISTS = {0xDC, 0xDD}
_MAPS = {0xDE, 0xDF}
# first byte of a number or an extension of fixed size -> how many bytes follow
_FIXED = {
    **dict(zip((0xCA, 0xCB), (4, 8), strict=True)),
    **dict(zip(range(0xCC, 0xD0), (1, 2, 4, 8), strict=True)),
    **dict(zip(range(0xD0, 0xD4), (1, 2, 4, 8), strict=True)),
    **dict(zip(range(0xD4, 0xD9), (2, 3, 5, 9, 17), strict=True)),
}


def check_num_values(text: bytearray, limit: int) -> None:
    """Raise a `RequestError` if a msgpack body has more than `limit` values.

    A body that is not valid msgpack may pass, because the decoder refuses it later.
    """
    if len(text) <= limit:  # each takes a byte at least
        return
    position = count = 0
    end = len(text)
    while position < end:
        count += 1
        if count > limit:
            raise RequestError(f"the body has more than {limit} values, which is the limit")
        position += _get_size(text, position)


def _get_size(text: bytearray, position: int) -> int:
    """Return the size in bytes of a msgpack value: of a list or a map only that of its head."""
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
