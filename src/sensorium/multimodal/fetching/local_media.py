"""Media that need no network: `data:` URLs, and `file:` URLs below one allowed directory.

Strict base64 is decoded straight from the string. Whatever else browsers and clients send (line
breaks, the URL-safe alphabet, missing padding, percent-encoded `+`, `/` and `=`) is tidied only
after the strict decoding has refused it.

Invariants of files:
  1. Only regular files are read. Symbolic links are resolved first and the result is checked. The
     resolved path is then opened part by part without following links, so that a link made in
     between leads nowhere.
  2. A client can't learn what else exists on the disk: whatever is wrong has one text.
"""

from __future__ import annotations

import binascii
import os
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

import pybase64

from sensorium.multimodal.fetching.fetch import RefusedMediaError, refuse_above
from sensorium.types.errors import RequestError

_MAX_HEADER_CHARACTERS = 1024
# Percent-decoding costs many times the memory of its input, and is for short texts.
_MAX_PERCENT_ENCODED = 4 * 2**20
# Replaced one after the other: some passes of `bytes.replace` are faster than one `translate`.
_ESCAPES = {b"%2b": b"+", b"%2f": b"/", b"%3d": b"=", b"%20": b"", b"%0a": b"", b"%0d": b""}
_SPELLINGS = {b"\n": b"", b"\r": b"", b" ": b"", b"\t": b"", b"\f": b"", b"-": b"+", b"_": b"/"}


def decode_data_url(source: str, max_bytes: int) -> bytes:
    """Return the bytes of `data:[type][;parameters][;base64],payload`, whatever the type is."""
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


_MAX_CHARACTERS = 16 * 1024  # a path of PATH_MAX bytes, percent-encoded
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def read_local_file(source: str, *, allowed_path: Path | None, max_bytes: int) -> bytes:
    if allowed_path is None:
        raise RefusedMediaError("this server reads no local files", "local_file")
    path = _parse_path(source)
    try:
        descriptor = _open_below(allowed_path, path)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        raise _unreadable() from None
    try:
        return _read_regular(descriptor, max_bytes)
    except OSError:
        raise _unreadable() from None
    finally:
        os.close(descriptor)


def _unreadable() -> RefusedMediaError:
    return RefusedMediaError(
        "the local file can't be read: it is missing, not a file, or not in the allowed directory",
        "local_file",
    )


def _parse_path(source: str) -> str:
    try:
        if len(source) > _MAX_CHARACTERS:
            raise ValueError
        url = urlsplit(source)
        path = os.fsdecode(unquote_to_bytes(url.path))
        host = url.netloc.lower()
    except ValueError:
        raise RequestError("the file URL is malformed") from None
    if host not in ("", "localhost") or not path.startswith("/"):
        raise RequestError("a file URL looks like file:///directory/name, without a host")
    return path


def _open_below(allowed_path: Path, path: str) -> int:
    root = Path(os.path.realpath(allowed_path))
    *directories, name = Path(os.path.realpath(path)).relative_to(root).parts or (".",)
    parent = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for directory in directories:
            child = os.open(directory, _OPEN_FLAGS | os.O_DIRECTORY, dir_fd=parent)
            os.close(parent)
            parent = child
        return os.open(name, _OPEN_FLAGS, dir_fd=parent)
    finally:
        os.close(parent)


def _read_regular(descriptor: int, max_bytes: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable()
    refuse_above(max_bytes, status.st_size)
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read(status.st_size)
