"""Expands a packed checkpoint into a standard one.

A packed folder has the small files of a checkpoint unchanged, its tensors in safetensors files, and
`manifest.json` with the SHA-256 of all its files and of all files of the expanded checkpoint. A
tensor `NAME` of int8 has a companion `NAME.int8_scale` in float32 with one number for each entry of
its first dimension, by which that entry is multiplied. All other tensors are unchanged.

The bytes of the expanded checkpoint are the same on every machine: the product of an 8-bit integer
and a float32 is rounded once, and the file is written here and not by a library that may change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sensorium.types.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
SCALE_SUFFIX = ".int8_scale"
_DTYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "bool": "BOOL"}
_ALIGNMENT = 8  # the header's length is a multiple of it, as in the safetensors library


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The SHA-256 of each file of a packed folder and of its expanded checkpoint."""

    packed: dict[str, str]  # file name -> SHA-256
    expanded: dict[str, str]  # file name -> SHA-256

    @property
    def digest(self) -> str:
        """Return a digest of the expanded checkpoint, which identifies it."""
        lines = "".join(f"{name} {value}\n" for name, value in sorted(self.expanded.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


def read_manifest(packed: Path) -> Manifest:
    try:
        return msgspec.json.decode((packed / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise ModelError(
            "this installation of Sensorium comes without its own model: name another one, "
            "a directory or a hub id"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(_describe_damage(packed / MANIFEST, error)) from error


def is_whole(folder: Path, digests: Mapping[str, str]) -> bool:
    """Return whether a folder has exactly these files, byte for byte.

    There must be no others, because they might be read too.
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
    """Write the expanded checkpoint into an empty folder that exists.

    An `OSError` always comes from the destination. A damaged packed folder raises a `ModelError`.
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
            f"what was written to {str(destination)!r} is not what {MANIFEST} says: "
            "the disk or this installation of Sensorium is damaged"
        )


def write_weights(tensors: Mapping[str, npt.NDArray[Any]], path: Path) -> None:
    """Write packed tensors in their expanded form into one safetensors file."""
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
        for values in _unpack(tensors, names):
            file.write(values.data)


def _unpack(
    tensors: Mapping[str, npt.NDArray[Any]], names: list[str]
) -> Iterator[npt.NDArray[Any]]:
    for name in names:
        scale = tensors.get(name + SCALE_SUFFIX)
        yield tensors[name] if scale is None else scale_rows(tensors[name], scale)


def scale_rows(
    integers: npt.NDArray[np.int8], scale: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    rows = integers.reshape(len(scale), -1).astype("<f4")
    rows *= scale[:, None]
    return rows.reshape(integers.shape)


def _read(path: Path, digest: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(_describe_damage(path, error)) from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise ModelError(_describe_damage(path, "it is not what was packed"))
    return content


def _describe_damage(path: Path, reason: object) -> str:
    return f"this installation of Sensorium is damaged: {str(path)!r}: {reason}. Install it again"


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
