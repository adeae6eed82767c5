"""Reads a server's API keys from places that other users of the machine can't see.

Everybody can read the command lines of processes. So keys may also stand in a file or in an
environment variable. A key is never part of an error or of a log line.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from sensorium.types.errors import ModelError

VARIABLE = "SENSORIUM_API_KEY"
_MAX_CHARACTERS = 2**20


def take_keys(given: Sequence[str], path: str | None, notes: list[str]) -> tuple[str, ...]:
    """Return the keys that requests may have: those in `given`, and those in the file at `path`.

    Without either, they come from the variable `SENSORIUM_API_KEY`, which is removed in any case,
    so that no child process has it. A file and the variable have one key in a line. A sentence is
    added to `notes` if every user of the machine can read the file. Raise a `ModelError` if the
    file can't be read, or if a key, the file or the variable is empty.
    """
    variable = os.environ.pop(VARIABLE, None)
    if not all(map(str.strip, given)):
        raise ModelError("the key of --api-key is empty: give one, or leave the flag out")
    if path is not None:
        return (*given, *_split(_read(path, notes), f"the file {path} of --api-key-file"))
    if given or variable is None:
        return tuple(given)
    return _split(variable, f"the variable {VARIABLE}")


def get_client_key(given: str | None, *others: str) -> str | None:
    """Return `given`, else the first key in `SENSORIUM_API_KEY`, else in the variables `others`."""
    if given:
        return given
    lines = _list_lines(os.environ.get(VARIABLE, ""))
    return lines[0] if lines else next(filter(None, map(os.environ.get, others)), None)


def _read(path: str, notes: list[str]) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:  # some editors write a byte order mark
            text = file.read(_MAX_CHARACTERS + 1)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ModelError(
            f"the file {path} of --api-key-file can't be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError:
        # Not a cause of the new error: its text would have a part of the file.
        raise ModelError(f"the file {path} of --api-key-file is no text in UTF-8") from None
    if len(text) > _MAX_CHARACTERS:
        raise ModelError(f"the file {path} of --api-key-file is larger than a mebibyte")
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        notes.append(f"every user of this machine can read the keys in {path}: chmod 600 {path}")
    return text


def _list_lines(text: str) -> list[str]:
    return list(filter(None, map(str.strip, text.replace("\r", "\n").split("\n"))))


def _split(text: str, source: str) -> tuple[str, ...]:
    keys = tuple(dict.fromkeys(_list_lines(text)))
    if not keys:
        raise ModelError(f"{source} is empty: write a key into it, one in a line if there are more")
    if not all(map(str.isprintable, keys)):
        raise ModelError(f"{source} has a key with characters that can't be sent, such as NUL")
    return keys
