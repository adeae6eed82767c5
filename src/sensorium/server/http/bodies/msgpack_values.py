"""Counts the values of a msgpack text without making them: a body of empty lists would take fifty
times its size.
"""

from __future__ import annotations

from sensorium.types.errors import RequestError

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
    """Raises a `RequestError` at more. What isn't msgpack is left to who decodes it."""
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
    """Of the value that begins here; of a list or map, of its head."""
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
