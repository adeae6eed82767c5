"""Reads `file:` URLs: regular files below one allowed directory, and nothing else.

Invariants:
  1. Symbolic links are resolved first and the result is checked; the resolved path is then opened
     part by part without following links, so that a link made in between leads nowhere.
  2. A client can't learn what else exists on the disk: whatever is wrong has one text.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from sensorium.multimodal.fetching.refusal import RefusedMediaError, refuse_above
from sensorium.types.errors import RequestError

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
