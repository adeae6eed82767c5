"""Reads the header of a safetensors file, to check its length and the size of its tensors.

The format: 8 bytes with the length of the header (little endian), the header as JSON, the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sensorium.types.errors import ModelError

_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
# Transformers converts these types to the dtype that is asked for. Others stay as they are.
_CONVERTED = frozenset({"F64", "F32", "F16", "BF16"})


def get_num_weight_bytes(paths: Iterable[Path], *, element_size: int) -> int:
    """Return the size of all tensors when floating-point ones are converted to `element_size`.

    Raises a `ModelError` for a file that is cut short.
    """
    return sum(
        _get_num_bytes(tensor, element_size) for path in paths for tensor in read_tensors(path)
    )


def _get_num_bytes(tensor: dict[str, Any], element_size: int) -> int:
    if tensor["dtype"] in _CONVERTED:
        return math.prod(tensor["shape"]) * element_size
    start, end = tensor["data_offsets"]
    return int(end - start)


def read_tensors(path: Path) -> list[dict[str, Any]]:
    """Return the `dtype`, `shape` and `data_offsets` of each tensor in a file."""
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
        raise ModelError(f"{path} is not a safetensors file, or cut short: {error}") from error
    expected = _PREFIX_BYTES + header_size + end
    if num_file_bytes < expected:
        raise ModelError(f"{path} is cut short: it has {num_file_bytes} of {expected} bytes")
    return tensors
