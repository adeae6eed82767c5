"""Tensors as one block of bytes and a header that describes it, and back without a copy.

The block is what crosses between processes: in a pipe, in a message or in shared memory. The
header is msgpack; nothing here is pickle. Headers may come from a client: they are checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import msgspec
import torch
from msgspec.structs import replace

from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalKwargsItem

ALIGNMENT = 64  # of each tensor in the block, in bytes; a cache line
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_MAX_DIMENSIONS = 8


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[TensorSpec, ...])


def get_num_bytes(kwargs: MultiModalKwargsItem) -> int:
    """The size of the block."""
    return sum(_align(tensor.nbytes) for tensor in kwargs.values())


def encode_header(kwargs: MultiModalKwargsItem) -> bytes:
    specs = []
    offset = 0
    for name, tensor in kwargs.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise RequestError(f"a processed item can't hold {name} as {dtype}")
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape), offset))
        offset += _align(tensor.nbytes)
    return _encoder.encode(specs)


def write_block(kwargs: MultiModalKwargsItem, block: memoryview) -> None:
    """Copy the tensors into a writable block of `get_num_bytes`."""
    offset = 0
    for tensor in kwargs.values():
        if tensor.nbytes:
            source = as_bytes(tensor)
            torch.frombuffer(block, dtype=torch.uint8, count=tensor.nbytes, offset=offset).copy_(
                source
            )
        offset += _align(tensor.nbytes)


def as_buffers(kwargs: MultiModalKwargsItem) -> list[memoryview]:
    """The block in pieces, for a writer that gathers: no copy, where a tensor is contiguous."""
    buffers = []
    for tensor in kwargs.values():
        if tensor.nbytes:
            buffers.append(as_bytes(tensor).numpy().data)
            buffers.append(memoryview(bytes(_align(tensor.nbytes) - tensor.nbytes)))
    return buffers


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory as a flat tensor of bytes: a view, where it is contiguous and on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def decode_block(header: bytes, block: memoryview) -> Mapping[str, torch.Tensor]:
    """Views of a writable block. A `RequestError` if the header doesn't fit it."""
    return {spec.name: decode_tensor(spec, block) for spec in _decode_header(header)}


def as_frames(kwargs: MultiModalKwargsItem) -> list[memoryview]:
    """One piece of memory per tensor, where each travels on its own: no copy, where it is
    contiguous.
    """
    return [as_bytes(tensor).numpy().data for tensor in kwargs.values()]


def decode_frames(header: bytes, frames: Sequence[memoryview]) -> Mapping[str, torch.Tensor]:
    """Views of writable frames, one per tensor of the header."""
    specs = _decode_header(header)
    if len(specs) != len(frames):
        raise RequestError(f"{len(frames)} frames for {len(specs)} tensors")
    return {
        spec.name: decode_tensor(replace(spec, offset=0), frame)
        for spec, frame in zip(specs, frames, strict=True)
    }


def _decode_header(header: bytes) -> tuple[TensorSpec, ...]:
    try:
        return _decoder.decode(header)
    except msgspec.MsgspecError as error:
        raise RequestError(f"tensors can't be decoded: {error}") from error


def decode_tensor(spec: TensorSpec, block: memoryview) -> torch.Tensor:
    """A view of a writable block. A `RequestError` if it can't be one."""
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        raise RequestError(f"tensor {spec.name!r}: unknown dtype {spec.dtype!r}")
    if len(spec.shape) > _MAX_DIMENSIONS:
        raise RequestError(
            f"tensor {spec.name!r} has {len(spec.shape)} dimensions, {_MAX_DIMENSIONS} at most"
        )
    if any(size < 0 for size in spec.shape):
        raise RequestError(f"tensor {spec.name!r}: impossible shape {spec.shape}")
    count = prod(spec.shape)
    end = spec.offset + count * dtype.itemsize
    if spec.offset < 0 or spec.offset % ALIGNMENT or end > len(block):
        raise RequestError(f"tensor {spec.name!r} of shape {spec.shape} is not inside its block")
    if count == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(block, dtype=dtype, count=count, offset=spec.offset).reshape(spec.shape)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
