"""Reads the headers of safetensors files, and refuses those that the library would refuse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from sensorium.checkpoints.files import parse_json
from sensorium.types.errors import ModelError

# A safetensors file has 8 bytes with the length of its header (little endian), the header as JSON,
# and the tensors.
_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
_METADATA = "__metadata__"
# Transformers converts these types to the dtype that the model is loaded in, and no other types.
_CONVERTED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_KEPT_BYTES = dict.fromkeys(("BOOL", "I8", "U8"), 1) | dict.fromkeys(("I16", "U16"), 2)
_NUM_BYTES = _CONVERTED_BYTES | _KEPT_BYTES | {"I32": 4, "U32": 4, "I64": 8, "U64": 8}


class StoredTensor(NamedTuple):
    """A tensor as a header describes it: its type, its number of elements, and its bytes."""

    dtype: str
    num_elements: int
    start: int  # in bytes, behind the header
    end: int


def get_num_weight_bytes(paths: Iterable[Path], *, element_size: int) -> int:
    """Return the memory in bytes that the tensors in safetensors files take when they are loaded.

    Floating-point tensors are counted with `element_size` bytes per number, because they are
    converted to one type. Only the headers are read.
    """
    return sum(
        tensor.num_elements * element_size
        if tensor.dtype in _CONVERTED_BYTES
        else tensor.end - tensor.start
        for path in paths
        for tensor in read_tensors(path)
    )


def read_tensors(path: Path) -> list[StoredTensor]:
    """Return the tensors in a safetensors file, in the order of their bytes.

    Raise `ModelError` if the file can't be read, or if its header or its size is wrong.
    """
    try:
        with path.open("rb") as file:
            num_file_bytes = path.stat().st_size
            header_size = int.from_bytes(file.read(_PREFIX_BYTES), "little")
            if header_size > _MAX_HEADER_BYTES:
                raise ModelError(f"{path} is not a safetensors file")
            header = file.read(header_size)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    try:
        tensors = _parse_header(header)
    except ValueError as error:
        raise ModelError(f"{path} is not a safetensors file, or is damaged: {error}") from error
    expected = _PREFIX_BYTES + header_size + (tensors[-1].end if tensors else 0)
    if num_file_bytes < expected:
        raise ModelError(f"{path} is cut short: it has {num_file_bytes} of {expected} bytes")
    if num_file_bytes > expected:
        raise ModelError(
            f"{path} is damaged: it has {num_file_bytes} bytes, and its header tells of {expected}"
        )
    return tensors


def _parse_header(header: bytes) -> list[StoredTensor]:
    """Return the tensors that a header describes; raise `ValueError` if it is wrong."""
    content = parse_json(header)
    if not isinstance(content, dict):
        raise ValueError("its header is not a JSON object")
    metadata = content.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"its {_METADATA} has more than text")
    tensors = [_parse_tensor(name, entry) for name, entry in content.items() if name != _METADATA]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            raise ValueError("the bytes of its tensors overlap, or have gaps between them")
        end = tensor.end
    return tensors


def _parse_tensor(name: str, entry: object) -> StoredTensor:
    if not isinstance(entry, Mapping):
        raise ValueError(f"the entry of the tensor {name[:200]!r} is not a JSON object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        raise ValueError(f"the tensor {name[:200]!r} has no dtype")
    if not (isinstance(shape, list) and all(map(_is_size, shape))):
        raise ValueError(f"the shape of the tensor {name[:200]!r} is not a list of sizes")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets))):
        raise ValueError(f"the data_offsets of the tensor {name[:200]!r} are not two sizes")
    start, end = offsets
    num_elements, element_size = math.prod(shape), _NUM_BYTES.get(dtype)
    if start > end or (element_size and num_elements * element_size != end - start):
        raise ValueError(f"the shape and the data_offsets of the tensor {name[:200]!r} contradict")
    return StoredTensor(dtype, num_elements, start, end)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
