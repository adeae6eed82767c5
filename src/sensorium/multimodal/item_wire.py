"""One processed item as bytes that leave the machine: msgpack, tensors by name, and the layout.

`{"tensors": {name: {"dtype": "float32", "shape": [...], "data": bytes}}, "layout": {"text": ...,
"token_id": ..., "num_embeds": ...} | null}`. What comes from elsewhere is checked against its own
bytes before anything is allocated for it; whether it fits the model is checked by `item_spec`.
Numbers are finite.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from sensorium.multimodal.item_codec import TensorSpec, as_bytes, decode_tensor
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem

_MAX_TENSORS = 64


class WireTensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class WireLayout(msgspec.Struct, frozen=True):
    text: str
    token_id: int
    num_embeds: int


class WireItem(msgspec.Struct, frozen=True):
    tensors: dict[str, WireTensor]
    layout: WireLayout | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WireItem)


def encode_item(kwargs: MultiModalKwargsItem, layout: ItemLayout | None) -> bytes:
    tensors = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tuple(tensor.shape),
            "data": as_bytes(tensor).numpy().data,
        }
        for name, tensor in kwargs.items()
    }
    own: Any = None
    if layout is not None:
        own = WireLayout(layout.text, layout.token_id, layout.num_embeds)
    return _encoder.encode({"tensors": tensors, "layout": own})


def decode_item(data: bytes | memoryview) -> tuple[MultiModalKwargsItem, ItemLayout | None]:
    """The tensors own their memory. A `RequestError` says what is wrong with the bytes."""
    try:
        item = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"it is no processed item in msgpack: {error}") from error
    if len(item.tensors) > _MAX_TENSORS:
        raise RequestError(f"it has {len(item.tensors)} tensors, {_MAX_TENSORS} at most")
    layout = None
    if item.layout is not None:
        layout = ItemLayout(
            text=item.layout.text,
            token_id=item.layout.token_id,
            num_embeds=item.layout.num_embeds,
        )
    return {name: _decode(name, tensor) for name, tensor in item.tensors.items()}, layout


def _decode(name: str, tensor: WireTensor) -> torch.Tensor:
    spec = TensorSpec(name[:200], tensor.dtype[:50], tensor.shape, 0)
    if not all(spec.shape):
        raise RequestError(f"tensor {spec.name!r} of shape {spec.shape[:9]} holds nothing")
    own = bytearray(tensor.data)  # what it came in may be any size, and is read-only
    decoded = decode_tensor(spec, memoryview(own))
    if decoded.nbytes != len(own):
        raise RequestError(
            f"tensor {spec.name!r} of shape {spec.shape} has {decoded.nbytes} bytes, not {len(own)}"
        )
    if decoded.dtype is torch.bool and bool((decoded.view(torch.uint8) > 1).any()):
        raise RequestError(f"tensor {spec.name!r} holds bytes that are neither true nor false")
    if decoded.is_floating_point() and not bool(torch.isfinite(decoded).all()):
        raise RequestError(f"tensor {spec.name!r} holds values that are not finite numbers")
    return decoded
