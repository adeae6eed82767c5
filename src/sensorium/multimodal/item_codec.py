"""Encodes processed items as bytes, and decodes them, for other processes and for the network.

Between processes an item is a header and one block of bytes, decoded without a copy. Over the
network it is one msgpack map: `{"tensors": {name: {"dtype": "float32", "shape": [...], "data":
bytes}}, "layout": {"text": ..., "token_id": ..., "num_embeds": ...} | null}`. Embeddings that a
client has computed come in the same form, as one tensor.

Nothing here is pickled. Received data is checked against its own bytes before anything is allocated
for it. Whether it fits the model is checked by `item_spec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import torch
from msgspec.structs import replace

from sensorium.types.errors import RequestError
from sensorium.types.multimodal import PRECOMPUTED, ItemLayout, MultiModalKwargsItem

MAX_EMBEDS = 2**16  # of one item; the context and the encoder cache allow far less
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
_MAX_TENSORS = 64
_MAX_SIZES = 2**48  # the product of an empty tensor's other sizes: PyTorch takes up to 2**63


class _TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class _WireTensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class _WireItem(msgspec.Struct, frozen=True):
    tensors: dict[str, _WireTensor]
    layout: ItemLayout | None = None


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(tuple[_TensorSpec, ...])
_item_decoder = msgspec.msgpack.Decoder(_WireItem)


@dataclass(frozen=True, slots=True, eq=False)
class PrecomputedEmbeds:
    """The encoder output for one media item, which a client sent in place of the item.

    Raise `RequestError` on creation unless the tensor is dense, of floating-point numbers, and has
    1 to `MAX_EMBEDS` rows. Whether the model accepts such embeddings is checked elsewhere.
    """

    tensor: torch.Tensor  # [num_embeds, width], floating-point numbers

    def __post_init__(self) -> None:
        tensor = self.tensor
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        if not is_plain or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
            raise RequestError("embeddings must be a plain tensor: dense, not quantized or meta")
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise RequestError(
                f"embeddings must be 16-, 32- or 64-bit floating-point numbers, not {tensor.dtype}"
            )
        if tensor.ndim != 2 or not 0 < len(tensor) <= MAX_EMBEDS or not tensor.shape[1]:
            raise RequestError(
                f"embeddings must have the shape [1 to {MAX_EMBEDS}, width], "
                f"not {list(tensor.shape)}"
            )


def get_num_bytes(kwargs: MultiModalKwargsItem) -> int:
    """Return the bytes of a media item's block, each tensor padded to a multiple of `ALIGNMENT`."""
    return sum(_align(tensor.nbytes) for tensor in kwargs.values())


def encode_header(kwargs: MultiModalKwargsItem) -> bytes:
    """Return a msgpack header with name, dtype, shape and byte offset of each tensor in a block.

    Raise `RequestError` if the codec does not support the dtype of a tensor.
    """
    specs = []
    offset = 0
    for name, tensor in kwargs.items():
        dtype = _name_dtype(tensor)
        if dtype not in _DTYPES:
            raise RequestError(
                f"tensor {name!r} of a processed media item can't have the dtype {dtype}"
            )
        specs.append(_TensorSpec(name, dtype, tuple(tensor.shape), offset))
        offset += _align(tensor.nbytes)
    return _encoder.encode(specs)


def write_block(kwargs: MultiModalKwargsItem, block: memoryview) -> None:
    """Copy the tensors of an item into a writable block of `get_num_bytes(kwargs)` bytes."""
    offset = 0
    for tensor in kwargs.values():
        if tensor.nbytes:
            place = torch.frombuffer(block, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
            place.copy_(as_bytes(tensor))
        offset += _align(tensor.nbytes)


def as_buffers(kwargs: MultiModalKwargsItem) -> list[memoryview]:
    """Return the content of a media item's block as several buffers, to be written in this order.

    Tensors that are contiguous and in host memory are not copied.
    """
    buffers = []
    for tensor in kwargs.values():
        if tensor.nbytes:
            buffers.append(as_bytes(tensor).numpy().data)
            buffers.append(memoryview(bytes(_align(tensor.nbytes) - tensor.nbytes)))
    return buffers


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes (flat uint8) on the host, as a view if it is contiguous there."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def decode_block(header: bytes, block: memoryview) -> Mapping[str, torch.Tensor]:
    """Return the tensors that a header describes, by name, as views of a writable block of memory.

    Raise `RequestError` if the header can't be decoded, or places a tensor outside of the block.
    """
    return {spec.name: _decode_tensor(spec, block) for spec in _decode_header(header)}


def as_frames(kwargs: MultiModalKwargsItem) -> list[memoryview]:
    """Return each tensor's bytes as a flat buffer; contiguous ones on the host are not copied."""
    return [as_bytes(tensor).numpy().data for tensor in kwargs.values()]


def decode_frames(header: bytes, frames: Sequence[memoryview]) -> Mapping[str, torch.Tensor]:
    """Return the tensors that a header describes, by name, as views of one writable buffer each.

    Raise `RequestError` if the header can't be decoded or does not fit the frames.
    """
    specs = _decode_header(header)
    if len(specs) != len(frames):
        raise RequestError(
            f"a media item has {len(specs)} tensors, but came in {len(frames)} parts of a message"
        )
    return {
        spec.name: _decode_tensor(replace(spec, offset=0), frame)
        for spec, frame in zip(specs, frames, strict=True)
    }


def encode_item(kwargs: MultiModalKwargsItem, layout: ItemLayout | None) -> bytes:
    """Return a processed media item in msgpack, as it is sent over the network."""
    tensors = {
        name: _WireTensor(_name_dtype(tensor), tuple(tensor.shape), as_bytes(tensor).numpy().data)
        for name, tensor in kwargs.items()
    }
    return _encoder.encode(_WireItem(tensors, layout))


def decode_item(data: bytes | memoryview) -> tuple[MultiModalKwargsItem, ItemLayout | None]:
    """Return the tensors and the layout of a media item that was received over the network.

    The tensors are copies of finite numbers. The layout is None if the sender gave none. Raise
    `RequestError` if `data` is not a processed item in msgpack.
    """
    item = _decode_wire(data, "the data is not a processed media item in msgpack")
    if len(item.tensors) > _MAX_TENSORS:
        raise RequestError(
            f"the media item has {len(item.tensors)} tensors, but may have {_MAX_TENSORS} at most"
        )
    tensors = {name: _copy_tensor(name, tensor) for name, tensor in item.tensors.items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise RequestError(f"tensor {name[:200]!r} holds values that are not finite numbers")
    return tensors, item.layout


def decode_embeds(encoded: bytes) -> PrecomputedEmbeds:
    """Return a client's embeddings, or raise `RequestError` if the msgpack is not one matrix."""
    item = _decode_wire(encoded, "embeddings can't be decoded: they must be msgpack")
    if item.tensors.keys() != {PRECOMPUTED}:
        raise RequestError(f"embeddings must be one tensor of the name {PRECOMPUTED!r}")
    given = item.tensors[PRECOMPUTED]
    if len(given.shape) != 2 or min(given.shape) < 1:
        raise RequestError(
            f"embeddings must have the shape [number, width], not {list(given.shape)}"
        )
    return PrecomputedEmbeds(_copy_tensor(PRECOMPUTED, given))


def _decode_wire(data: bytes | memoryview, complaint: str) -> _WireItem:
    try:
        return _item_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{complaint}: {error}") from error


def _copy_tensor(name: str, tensor: _WireTensor) -> torch.Tensor:
    spec = _TensorSpec(name[:200], tensor.dtype[:50], tensor.shape, 0)
    if not all(spec.shape):
        raise RequestError(
            f"tensor {spec.name!r} of shape {spec.shape[:9]} holds nothing: no dimension may be 0"
        )
    own = bytearray(tensor.data)  # the message may be of any size, and is read-only
    decoded = _decode_tensor(spec, memoryview(own))
    if decoded.nbytes != len(own):
        raise RequestError(
            f"tensor {spec.name!r} of shape {spec.shape} has {decoded.nbytes} bytes, not {len(own)}"
        )
    if decoded.dtype is torch.bool and bool((decoded.view(torch.uint8) > 1).any()):
        raise RequestError(
            f"tensor {spec.name!r} of booleans holds bytes that are neither true nor false"
        )
    return decoded


def _decode_header(header: bytes) -> tuple[_TensorSpec, ...]:
    try:
        return _header_decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the list of an item's tensors can't be decoded: {error}") from error


def _decode_tensor(spec: _TensorSpec, block: memoryview) -> torch.Tensor:
    """Return a tensor as a view of a writable block; raise `RequestError` if it is not inside."""
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        raise RequestError(
            f"tensor {spec.name!r} has unknown dtype {spec.dtype!r} (known: {', '.join(_DTYPES)})"
        )
    if len(spec.shape) > _MAX_DIMENSIONS:
        raise RequestError(
            f"tensor {spec.name!r} has {len(spec.shape)} dimensions, but may have "
            f"{_MAX_DIMENSIONS} at most"
        )
    if any(size < 0 for size in spec.shape):
        raise RequestError(
            f"tensor {spec.name!r} has the impossible shape {spec.shape}: a size is negative"
        )
    count = prod(spec.shape)
    end = spec.offset + count * dtype.itemsize
    if spec.offset < 0 or spec.offset % ALIGNMENT or end > len(block):
        raise RequestError(f"tensor {spec.name!r} of shape {spec.shape} does not fit its data")
    if count == 0:
        if prod(max(1, size) for size in spec.shape) > _MAX_SIZES:
            raise RequestError(f"tensor {spec.name!r} has the impossible shape {spec.shape}")
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(block, dtype=dtype, count=count, offset=spec.offset).reshape(spec.shape)


def _name_dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
