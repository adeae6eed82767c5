"""Expands the embedded model into a folder of the user's cache, and finds it there.

The package has the model in a packed form (8-bit weights), as a folder with the small files of a
checkpoint unchanged, its tensors in safetensors files, and `manifest.json`. A tensor `NAME` of int8
has a companion `NAME.int8_scale` in float32, with one factor for each entry of the tensor's first
dimension. All other tensors are unchanged.

Invariants:
  1. A folder that is returned was compared with the manifest, byte for byte.
  2. A folder gets its final name when it is complete. The process that makes it holds the lock.
  3. A complete folder is never changed again, because other processes may be reading it.
  4. The bytes of the expanded checkpoint are the same on every machine: the product of an 8-bit
     integer and a float32 is rounded once, and the file is written here, not by a library that may
     change.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sensorium.embedded import EMBEDDED_MODEL
from sensorium.types.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger(__name__)
PACKED_MODEL = Path(__file__).parent / EMBEDDED_MODEL
CACHE_VARIABLE = "SENSORIUM_CACHE_DIR"
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
SCALE_SUFFIX = ".int8_scale"
_HINT = f"set {CACHE_VARIABLE} to use another folder"
_DTYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "bool": "BOOL"}
_ALIGNMENT = 8  # the header's length is a multiple of it, as in the safetensors library


def find_embedded_model(packed: Path = PACKED_MODEL) -> Path:
    """Return the folder of the embedded model as a standard checkpoint, and create it if needed.

    The folder is in the user's cache folder or, if that can't be written to, in a temporary folder
    that only this user can access. Raise `ModelError` if neither can be used, or the disk is full.
    """
    manifest = read_manifest(packed)
    cache = _get_cache_folder()
    try:
        if not cache.is_absolute():
            raise OSError("the home folder can't be found")
        return _find_below(cache, packed, manifest)
    except OSError as error:
        other, reason = _get_private_folder(), error.strerror or error
        logger.warning(
            "%s can't be used (%s): storing the model in %s; %s", cache, reason, other, _HINT
        )
    try:
        return _find_below(other, packed, manifest)
    except OSError as error:
        raise ModelError(
            f"{EMBEDDED_MODEL} can't be written to {other}: {error}; {_HINT}"
        ) from error


def _get_cache_folder() -> Path:
    """Return the user's cache folder: `SENSORIUM_CACHE_DIR`, or one in the XDG cache folder.

    The path is not absolute if it depends on the user's home folder and that can't be found, for
    example for a user without an account.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(os.path.expanduser(chosen) if chosen[0] == "~" else os.path.abspath(chosen))
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # by its specification, a relative path is to be ignored
        return Path(shared) / "sensorium"
    return Path(os.path.expanduser("~"), ".cache", "sensorium")


def _get_private_folder() -> Path:
    """Return a temporary folder that only this user can access, and create it if needed.

    All processes of the user share the folder, so its name is fixed, and another user may have
    created it. Raise `ModelError` if it can't be created, belongs to another user, or can be
    accessed by others.
    """
    folder = Path(tempfile.gettempdir()) / f"sensorium-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ModelError(f"the folder {folder} can't be made: {error.strerror}; {_HINT}") from error
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not is_private or found.st_uid != os.getuid():
        raise ModelError(f"{folder} is not used, because other users can access it; {_HINT}")
    return folder


def _find_below(cache: Path, packed: Path, manifest: Manifest) -> Path:
    """Return the expanded model's folder in a cache folder, created anew if it is damaged.

    Raise `ModelError` if the disk is full, and `OSError` if the cache folder can't be used.
    """
    target = cache / f"{EMBEDDED_MODEL}-{manifest.digest[:16]}"
    if is_whole(target, manifest.expanded):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{target.name}.lock"):
            # Another process may have made it while this one waited for the lock.
            if not is_whole(target, manifest.expanded):
                _make(target, packed, manifest)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"there is no room for {EMBEDDED_MODEL} in {cache}: it needs about 100 MB; {_HINT}"
            ) from error
        raise
    return target


def _make(target: Path, packed: Path, manifest: Manifest) -> None:
    """Create the folder of the expanded model at `target`, in place of a damaged one."""
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
    """Hold an exclusive lock on the file `path`, created if needed, during the `with` block.

    The system releases the lock if the process is killed. Raise `OSError` if `path` is a symbolic
    link.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The SHA-256 checksums of the files of a model, in its packed and in its expanded form."""

    packed: dict[str, str]  # file name -> SHA-256
    expanded: dict[str, str]  # file name -> SHA-256

    @property
    def digest(self) -> str:
        """Return a SHA-256 of the names and checksums of all files of the expanded checkpoint.

        A part of it is in the name of the cached folder, so that two versions never share one.
        """
        lines = "".join(f"{name} {value}\n" for name, value in sorted(self.expanded.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


def read_manifest(packed: Path) -> Manifest:
    """Read `manifest.json` of a packed model, or raise a `ModelError` if it can't be read."""
    try:
        return msgspec.json.decode((packed / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise ModelError(
            "this installation of Sensorium has no embedded model: name another model by its "
            "directory or its hub id"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(_describe_damage(packed / MANIFEST, error)) from error


def is_whole(folder: Path, digests: Mapping[str, str]) -> bool:
    """Return whether a folder contains exactly the given files, each with its SHA-256.

    The result is False if a file can't be read, or if the folder contains any other file, because
    that could be taken for a part of the checkpoint.
    """
    try:
        paths = list(folder.iterdir())
        has_all = {path.name for path in paths} == digests.keys()
        # Only plain files are read: reading a pipe would never end.
        is_plain = has_all and all(path.is_file() for path in paths)
        return is_plain and all(_hash_file(path) == digests[path.name] for path in paths)
    except OSError:
        return False


def expand(packed: Path, destination: Path, manifest: Manifest) -> None:
    """Write the expanded checkpoint of a packed model into the existing, empty `destination`.

    Raise `ModelError` if a packed file or a file that was written does not match the manifest, and
    `OSError` only for problems with the destination, for example a full disk.
    """
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, digest in manifest.packed.items():
        content = _read(packed / name, digest)
        if name.endswith(".safetensors"):
            from safetensors.numpy import load  # here, because it imports numpy

            tensors |= load(content)
        else:
            (destination / name).write_bytes(content)
    write_weights(tensors, destination / WEIGHTS)
    if not is_whole(destination, manifest.expanded):
        raise ModelError(
            f"the model's files in {str(destination)!r} do not match {MANIFEST}: the disk or this "
            "installation of Sensorium is damaged. Reinstall it"
        )


def write_weights(tensors: Mapping[str, npt.NDArray[Any]], path: Path) -> None:
    """Write packed tensors to one safetensors file, with 8-bit tensors expanded to float32."""
    names = sorted(name for name in tensors if not name.endswith(SCALE_SUFFIX))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        dtype = "float32" if name + SCALE_SUFFIX in tensors else tensor.dtype.name
        start, end = end, end + tensor.size * (4 if dtype == "float32" else tensor.itemsize)
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            scale = tensors.get(name + SCALE_SUFFIX)
            file.write((tensors[name] if scale is None else _scale(tensors[name], scale)).data)


def _scale(
    integers: npt.NDArray[np.int8], scale: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return 8-bit integers as float32, each entry of the first dimension times its factor."""
    rows = integers.reshape(len(scale), -1).astype("<f4")
    rows *= scale[:, None]
    return rows.reshape(integers.shape)


def _read(path: Path, digest: str) -> bytes:
    """Return the content of a packed file; raise `ModelError` if its SHA-256 is not `digest`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(_describe_damage(path, error)) from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ModelError(_describe_damage(path, "its checksum is wrong"))
    return content


def _describe_damage(path: Path, reason: object) -> str:
    return f"this installation of Sensorium is damaged: {str(path)!r}: {reason}. Reinstall it"


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
