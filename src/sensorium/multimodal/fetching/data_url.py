"""Decodes `data:` URLs, at little more than the cost of one base64 decoding.

What is strictly base64 is decoded straight from the string. Everything that browsers and clients
also send (line breaks, the URL-safe alphabet, missing padding, percent-encoded `+`, `/` and `=`)
is tidied only after the strict decoding has refused it.
"""

from __future__ import annotations

import binascii
from urllib.parse import unquote_to_bytes

import pybase64

from sensorium.multimodal.fetching.refusal import RefusedMediaError, refuse_above
from sensorium.types.errors import RequestError

_MAX_HEADER_CHARACTERS = 1024
# Percent-decoding costs many times the memory of its input, and is for short texts.
_MAX_PERCENT_ENCODED = 4 * 2**20
# Replaced one after the other: some passes of `bytes.replace` are faster than one `translate`.
_ESCAPES = {b"%2b": b"+", b"%2f": b"/", b"%3d": b"=", b"%20": b"", b"%0a": b"", b"%0d": b""}
_SPELLINGS = {b"\n": b"", b"\r": b"", b" ": b"", b"\t": b"", b"\f": b"", b"-": b"+", b"_": b"/"}


def decode_data_url(source: str, max_bytes: int) -> bytes:
    """The bytes of `data:[type][;parameters][;base64],payload`; the type is not looked at."""
    comma = source.find(",", 5, 5 + _MAX_HEADER_CHARACTERS)
    if comma < 0:
        raise RequestError("the data URL has no comma between its type and its content")
    parameters = [word.strip().lower() for word in source[5:comma].split(";")[1:]]
    num_characters = len(source) - comma - 1
    if "base64" in parameters:
        refuse_above(max_bytes, num_characters * 3 // 4 - 2)
        media = _decode_base64(source[comma + 1 :])
    else:
        refuse_above(max_bytes, num_characters // 3)
        if num_characters > _MAX_PERCENT_ENCODED:
            raise RefusedMediaError("a data URL of this size has to be base64", "size")
        media = _decode_percent(source[comma + 1 :])
    refuse_above(max_bytes, len(media))
    return media


def _decode_base64(payload: str) -> bytes:
    try:
        return pybase64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        pass
    try:
        return pybase64.b64decode(_tidy(payload), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("the content of the data URL is not base64") from None


def _tidy(payload: str) -> bytes:
    encoded = payload.encode("ascii")
    if b"%" in encoded:
        for escape, character in _ESCAPES.items():
            encoded = encoded.replace(escape, character).replace(escape.upper(), character)
    for spelling, character in _SPELLINGS.items():
        encoded = encoded.replace(spelling, character)
    encoded = encoded.rstrip(b"=")
    return encoded + b"=" * (-len(encoded) % 4)


def _decode_percent(payload: str) -> bytes:
    try:
        return unquote_to_bytes(payload)
    except UnicodeEncodeError:
        raise RequestError("the content of the data URL is not valid text") from None
