"""The packed form of a checkpoint, and how a stock one is made of it.

A packed folder has a checkpoint's small files as they are, its tensors in safetensors files, and
`manifest.json` with the SHA-256 of everything: of what lies there, and of what is to come of it. A
tensor `NAME` of int8 has a companion `NAME.int8_scale` in float32 with one number for each entry of
its first dimension, by which that entry is multiplied. All other tensors are as they were.

The bytes of the expanded checkpoint are the same on every machine: an integer of 8 bits times a
float32 is rounded once, and the file is written here, not by a library that may change.
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
_ALIGNMENT = 8  # of the header, as in the safetensors library


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """SHA-256 by file name: of the packed folder, and of the checkpoint that is made of it."""

    packed: dict[str, str]
    expanded: dict[str, str]

    @property
    def digest(self) -> str:
        """Of the checkpoint: another one has another."""
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
    """Whether these files are there, byte for byte, and no others: those might be read, too."""
    try:
        paths = list(folder.iterdir())
        has_all = {path.name for path in paths} == digests.keys()
        is_plain = has_all and all(path.is_file() for path in paths)  # a pipe would never end
        return is_plain and all(_hash_file(path) == digests[path.name] for path in paths)
    except OSError:
        return False


def expand(packed: Path, destination: Path, manifest: Manifest) -> None:
    """Into a folder that is there and empty. An `OSError` is the destination's."""
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, digest in manifest.packed.items():
        content = _read(packed / name, digest)
        if name.endswith(".safetensors"):
            from safetensors.numpy import load  # brings numpy along

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
    """One safetensors file with packed tensors as they are used."""
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
