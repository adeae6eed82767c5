"""What a checkpoint's files say of themselves: JSON, the names of its weights, their headers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sensorium.types.errors import ModelError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# A safetensors file has 8 bytes with the length of its header (little endian), the header as JSON,
# and the tensors.
_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
# Transformers converts these types to the dtype that is asked for. Others stay as they are.
_CONVERTED = frozenset({"F64", "F32", "F16", "BF16"})


def get_weight_names(directory: Path) -> tuple[str, ...]:
    """Return the names of a checkpoint's files of weights. Some of these files may be missing.

    Raises a `ModelError` if its index of weights can't be read.
    """
    index = directory / WEIGHTS_INDEX
    if (directory / WEIGHTS).is_file() or not index.is_file():
        return (WEIGHTS,)
    try:
        return tuple(sorted(set(json.loads(index.read_text())["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"the file {index} is not an index of weights: {error!r}") from error


def check_presence(model: str, directory: Path, names: Iterable[str]) -> None:
    """Raise a `ModelError` that names `model` if one of these files of weights is missing."""
    names = tuple(names)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing == [WEIGHTS]:
        raise ModelError(f"there are no weights in {str(directory)!r}{_get_hint(directory)}")
    if missing:
        raise ModelError(
            f"the weights of {model!r} are not complete: "
            f"{len(missing)} of {len(names)} files are missing, for example {missing[0]}"
        )


def _get_hint(directory: Path) -> str:
    """Return the end of the error text for missing weights.

    It mentions pickle files if the directory has any. They are not loaded, because they can run
    code when they are read.
    """
    pickles = [path.name for pattern in _PICKLES for path in sorted(directory.glob(pattern))]
    if not pickles:
        return f": {WEIGHTS} or {WEIGHTS_INDEX} is needed"
    return (
        f" but {pickles[0]}: only safetensors are loaded, because pickles can run code. "
        "Transformers' `save_pretrained` converts them"
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file, or an empty one if the file does not exist.

    Raises a `ModelError` if the file can't be read, is not JSON, or not an object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def get_num_weight_bytes(paths: Iterable[Path], *, element_size: int) -> int:
    """Return the memory in bytes that the tensors in safetensors files take when they are loaded.

    Floating-point tensors are counted with `element_size` bytes per number, because they are
    converted to one type. Only the headers are read. Raises a `ModelError` for a file that is cut
    short.
    """
    return sum(
        _get_num_bytes(tensor, element_size) for path in paths for tensor in read_tensors(path)
    )


def _get_num_bytes(tensor: dict[str, Any], element_size: int) -> int:
    if tensor["dtype"] in _CONVERTED:
        return int(math.prod(tensor["shape"])) * element_size
    start, end = tensor["data_offsets"]
    return int(end - start)


def read_tensors(path: Path) -> list[dict[str, Any]]:
    """Return the `dtype`, `shape` and `data_offsets` of each tensor in a safetensors file.

    Raises a `ModelError` if the file is not in this format, or shorter than its header demands.
    """
    num_file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(_PREFIX_BYTES), "little")
        if header_size > _MAX_HEADER_BYTES:
            raise ModelError(f"{path} is not a safetensors file")
        header = file.read(header_size)
    try:
        tensors = [value for name, value in json.loads(header).items() if name != "__metadata__"]
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a safetensors file, or is cut short: {error}") from error
    expected = _PREFIX_BYTES + header_size + end
    if num_file_bytes < expected:
        raise ModelError(f"{path} is cut short: it has {num_file_bytes} of {expected} bytes")
    return tensors
