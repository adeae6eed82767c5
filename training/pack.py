"""Packs a checkpoint for the package: matrices as 8-bit integers with a scale for each row.

    python -m training.pack CHECKPOINT_FOLDER src/sensorium/embedded/sensorium-mini

What is written is expanded once, as an installation does it, and compared with the checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save

from sensorium.embedded.cache import (
    MANIFEST,
    SCALE_SUFFIX,
    WEIGHTS,
    Manifest,
    expand,
    write_weights,
)

MAX_BYTES = 30_000_000
MAX_SHARD_BYTES = 16 * 2**20 - 2**16  # with room for a header
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_NUM_SHOWN = 8
Array = npt.NDArray[Any]


def pack(checkpoint: Path, destination: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, float]:
    """Pack a checkpoint and return the relative error of each tensor.

    The error is the root of the mean square, divided by that of the tensor. What was packed in the
    folder before is replaced.
    """
    if destination.exists() and not (destination / MANIFEST).is_file():
        raise SystemExit(f"{destination} is no packed checkpoint: it is not replaced")
    tensors = read_tensors(checkpoint)
    with TemporaryDirectory(dir=_make_parent(destination), prefix=".pack.") as folder:
        packed, expanded = Path(folder) / "packed", Path(folder) / "expanded"
        packed.mkdir()
        expanded.mkdir()
        _copy_small_files(checkpoint, packed)
        for number, shard in enumerate(make_shards(quantize(tensors)), start=1):
            # The library's `save_file` makes files that only their owner can read.
            (packed / f"packed-{number:05}.safetensors").write_bytes(save(shard))
        _write_manifest(packed, expanded)
        num_bytes = get_num_bytes(packed)
        if num_bytes > max_bytes:
            raise SystemExit(f"{num_bytes} bytes are more than the {max_bytes} that may be shipped")
        errors = measure_errors(tensors, load_file(expanded / WEIGHTS))
        if destination.exists():
            shutil.rmtree(destination)
        packed.rename(destination)
    return errors


def read_tensors(checkpoint: Path) -> dict[str, Array]:
    """Read all tensors of a checkpoint, floating-point ones as float32."""
    from safetensors.torch import load_file as load_torch_file  # reads bfloat16

    paths = sorted(checkpoint.glob("*.safetensors"))
    if not paths:
        raise SystemExit(f"there are no safetensors files in {checkpoint}")
    tensors: dict[str, Array] = {}
    for path in paths:
        for name, tensor in load_torch_file(path).items():
            tensors[name] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return tensors


def quantize(tensors: dict[str, Array]) -> dict[str, Array]:
    packed: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32 or tensor.ndim < 2:
            packed[name] = tensor
            continue
        packed[name], packed[name + SCALE_SUFFIX] = quantize_rows(tensor, name)
    return packed


def quantize_rows(tensor: npt.NDArray[np.float32], name: str = "a tensor") -> tuple[Array, Array]:
    """Return integers from -127 to 127, and a scale for each row."""
    if not np.isfinite(tensor).all():
        raise SystemExit(f"{name} has values that are no numbers")
    rows = tensor.reshape(len(tensor), -1)
    scale = np.abs(rows).max(axis=1) / np.float32(127)
    scale[scale == 0] = 1.0
    integers = np.clip(np.rint(rows / scale[:, None]), -127, 127).astype(np.int8)
    return integers.reshape(tensor.shape), scale


def make_shards(packed: dict[str, Array]) -> Iterator[dict[str, Array]]:
    shard: dict[str, Array] = {}
    num_bytes = 0
    for name, tensor in sorted(packed.items()):
        if shard and num_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = np.asarray(tensor, order="C")
        num_bytes += tensor.nbytes
    yield shard


def measure_errors(tensors: dict[str, Array], expanded: dict[str, Array]) -> dict[str, float]:
    if tensors.keys() != expanded.keys():
        raise SystemExit("the expanded checkpoint has other tensors")
    errors = {}
    for name, tensor in tensors.items():
        difference = np.linalg.norm((tensor - expanded[name]).astype(np.float64).ravel())
        norm = np.linalg.norm(tensor.astype(np.float64).ravel())
        errors[name] = float(difference / norm) if norm else float(difference)
    return errors


def get_num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _copy_small_files(checkpoint: Path, packed: Path) -> None:
    for path in sorted(path for pattern in _SMALL_FILES for path in checkpoint.glob(pattern)):
        if path.name.endswith(".index.json") or path.name == MANIFEST:
            continue
        if path.name == "config.json":
            config = json.dumps(_as_float32(json.loads(path.read_text())), indent=2)
            (packed / path.name).write_text(config + "\n")
        else:
            shutil.copyfile(path, packed / path.name)


def _as_float32(config: Any) -> Any:
    """Return a config that has float32 at every level."""
    if not isinstance(config, dict):
        return config
    names = ("dtype", "torch_dtype")
    return {
        name: "float32" if name in names and value is not None else _as_float32(value)
        for name, value in config.items()
    }


def _write_manifest(packed: Path, expanded: Path) -> None:
    digests = _hash_files(packed)
    tensors: dict[str, Array] = {}
    for name in digests:
        if name.endswith(".safetensors"):
            tensors |= load_file(packed / name)
    write_weights(tensors, expanded / WEIGHTS)
    small = {name: digest for name, digest in digests.items() if not name.endswith(".safetensors")}
    manifest = Manifest(packed=digests, expanded=small | _hash_files(expanded))
    expand(packed, expanded, manifest)  # as an installation does it, with all its checks
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (packed / MANIFEST).write_bytes(content + b"\n")


def _hash_files(folder: Path) -> dict[str, str]:
    paths = sorted(folder.iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _make_parent(destination: Path) -> Path:
    destination.parent.mkdir(parents=True, exist_ok=True)
    return destination.parent


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack a checkpoint for the package.")
    parser.add_argument("checkpoint", type=Path, help="a folder as `save_pretrained` makes it")
    parser.add_argument("destination", type=Path, help="a folder; one that was packed is replaced")
    arguments = parser.parse_args()
    errors = pack(arguments.checkpoint, arguments.destination)
    for name, error in sorted(errors.items(), key=lambda entry: -entry[1])[:_NUM_SHOWN]:
        print(f"{error:.5f}  {name}")
    print(f"relative error of {len(errors)} tensors: at most {max(errors.values()):.5f}")
    for path in sorted(arguments.destination.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path.name}")
    print(f"{get_num_bytes(arguments.destination):>12,}  bytes in all (at most {MAX_BYTES:,})")


if __name__ == "__main__":
    main()
