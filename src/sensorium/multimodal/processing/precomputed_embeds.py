"""What an encoder would give for an item, from a caller: a tensor, or its bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from sensorium.multimodal.item_codec import TensorSpec, decode_tensor
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import PRECOMPUTED

MAX_EMBEDS = 2**16  # of one item; the context and the encoder cache allow far less


@dataclass(frozen=True, slots=True, eq=False)
class PrecomputedEmbeds:
    """[num_embeds, width], real numbers. Whether a model takes them is decided elsewhere."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        tensor = self.tensor
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        if not is_plain or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
            raise RequestError("embeddings are a plain tensor that holds its values")
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise RequestError(f"embeddings are floating-point numbers, not {tensor.dtype}")
        if tensor.ndim != 2 or not 0 < len(tensor) <= MAX_EMBEDS or not tensor.shape[1]:
            raise RequestError(
                f"embeddings have the shape [1 to {MAX_EMBEDS}, width], not {list(tensor.shape)}"
            )


class _WireTensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data: bytearray


class _WireItem(msgspec.Struct):
    tensors: dict[str, _WireTensor]


_decoder = msgspec.msgpack.Decoder(_WireItem)


def decode_embeds(encoded: bytes) -> PrecomputedEmbeds:
    """From msgpack: `{"tensors": {"embeds": {"dtype": ..., "shape": [n, width], "data": ...}}}`."""
    try:
        item = _decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"embeddings can't be decoded: they are msgpack: {error}") from error
    if item.tensors.keys() != {PRECOMPUTED}:
        raise RequestError(f"embeddings are one tensor of the name {PRECOMPUTED!r}")
    given = item.tensors[PRECOMPUTED]
    if len(given.shape) != 2 or min(given.shape) < 1:
        raise RequestError(f"embeddings have the shape [number, width], not {list(given.shape)}")
    spec = TensorSpec(PRECOMPUTED, given.dtype, given.shape, 0)
    tensor = decode_tensor(spec, memoryview(given.data))
    if tensor.nbytes != len(given.data):
        raise RequestError(f"{len(given.data)} bytes for embeddings of {tensor.nbytes}")
    return PrecomputedEmbeds(tensor)
