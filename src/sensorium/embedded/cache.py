"""Expands the embedded model into a folder of the user's cache, and finds it there.

Invariants:
  1. A folder that is returned was compared with the manifest, byte for byte.
  2. A folder gets its name when it is complete. The process that makes it holds the lock.
  3. A complete folder is never changed again, because other processes may be reading it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sensorium.embedded import EMBEDDED_MODEL
from sensorium.embedded.expansion import Manifest, expand, is_whole, read_manifest
from sensorium.types.errors import ModelError

logger = logging.getLogger(__name__)
PACKED_MODEL = Path(__file__).parent / EMBEDDED_MODEL
CACHE_VARIABLE = "SENSORIUM_CACHE_DIR"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HINT = f"set {CACHE_VARIABLE} to use another folder"


def find_embedded_model(packed: Path = PACKED_MODEL) -> Path:
    """Return the folder of the embedded model as a standard checkpoint, and make it if needed.

    If the user's cache can't be written to, the folder is made in a temporary folder that only this
    user can access. Raises a `ModelError` if that fails too, or if there is no room.
    """
    manifest = read_manifest(packed)
    cache = _get_cache_folder()
    try:
        if not cache.is_absolute():
            raise OSError("there is no such home")
        return _find_below(cache, packed, manifest)
    except OSError as error:
        if error.errno in _FULL:
            raise ModelError(_describe_no_room(cache)) from error
        other = _get_private_folder()
        logger.warning(
            "%s can't be used (%s): storing the model in %s; %s",
            *(cache, error.strerror or error, other, _HINT),
        )
    try:
        return _find_below(other, packed, manifest)
    except OSError as error:
        if error.errno in _FULL:
            raise ModelError(_describe_no_room(other)) from error
        raise ModelError(
            f"{EMBEDDED_MODEL} can't be written to {other}: {error}; {_HINT}"
        ) from error


def _get_cache_folder() -> Path:
    """Return the cache folder that the environment names, or the default one.

    The path is not absolute if the home that it begins with can't be found, for example for a user
    without an account.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(os.path.expanduser(chosen) if chosen[0] == "~" else os.path.abspath(chosen))
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # by its specification, a relative path is to be ignored
        return Path(shared) / "sensorium"
    return Path(os.path.expanduser("~"), ".cache", "sensorium")


def _get_private_folder() -> Path:
    """Return a temporary folder that only this user can access.

    All processes of the user share it, so its name is fixed. As others could have made a folder of
    that name, its owner and its permissions are checked.
    """
    folder = Path(tempfile.gettempdir()) / f"sensorium-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ModelError(f"{folder} can't be made: {error.strerror}; {_HINT}") from error
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not is_private or found.st_uid != os.getuid():
        raise ModelError(f"{folder} is open to others: it is not used; {_HINT}")
    return folder


def _find_below(cache: Path, packed: Path, manifest: Manifest) -> Path:
    target = cache / f"{EMBEDDED_MODEL}-{manifest.digest[:16]}"
    if is_whole(target, manifest.expanded):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f".{target.name}.lock"):
        # Another process may have made it while this one waited for the lock.
        if not is_whole(target, manifest.expanded):
            _make(target, packed, manifest)
    return target


def _make(target: Path, packed: Path, manifest: Manifest) -> None:
    """Make the folder of the expanded model.

    Anything that exists in its place is removed: it is damaged, or was left by a process that was
    killed.
    """
    part = target.with_name(f".{target.name}.part")
    for leftover in (part, target):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)
    part.mkdir()
    try:
        expand(packed, part, manifest)
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that one process at a time can have.

    The system releases it if the process ends in any way. A symbolic link is not followed.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _describe_no_room(cache: Path) -> str:
    return f"there is no room for {EMBEDDED_MODEL} in {cache}: it needs about 100 MB; {_HINT}"
