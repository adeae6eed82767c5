"""Decodes JSON so that no single call keeps other threads waiting.

msgspec is fast, but holds the interpreter's lock while it decodes. On one core of a server 20 MB
take:

  a chat with one image in base64   12 ms   one call
  3 million token ids              140 ms   in slices
  400 thousand short messages      150 ms   in slices

So a text with few values is decoded at once, whatever its size; one with many is taken apart first,
value by value, without decoding them. What can't be taken apart cheaply (millions of tiny values)
is refused.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sensorium.types.errors import RequestError

MAX_VALUES = 2_000_000
_MAX_VALUES_AT_ONCE = 50_000  # some ten milliseconds
_COUNT_BYTES = 2**20
_FLAT_SLICE_BYTES = 2**18
_STRUCTURE = re.compile(rb'["\[{]')

Buffer = bytes | bytearray | memoryview


def decode_json(text: Buffer) -> Any:
    """Raises what `msgspec.json.decode` raises, and a `RequestError` at too many values."""
    num_values = _count_values(text)
    if num_values > MAX_VALUES:
        raise RequestError(f"the body has more than {MAX_VALUES} values")
    if num_values <= _MAX_VALUES_AT_ONCE:
        return msgspec.json.decode(text)
    kind = bytes(memoryview(text)[:64]).lstrip()[:1]
    if kind == b"{":
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        return {name: decode_json(memoryview(raw)) for name, raw in fields.items()}
    if kind != b"[":
        return msgspec.json.decode(text)
    if _is_flat(text):
        return _decode_flat(text)
    return [
        decode_json(memoryview(raw)) for raw in msgspec.json.decode(text, type=list[msgspec.Raw])
    ]


def _count_values(text: Buffer) -> int:
    """At least as many as there are, but for one: commas within strings count too."""
    view = memoryview(text)
    return sum(
        bytes(view[start : start + _COUNT_BYTES]).count(b",")
        for start in range(0, len(view), _COUNT_BYTES)
    )


def _is_flat(text: Buffer) -> bool:
    """A list of numbers and words."""
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
