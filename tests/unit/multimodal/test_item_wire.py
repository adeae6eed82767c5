"""An item as bytes: it comes back as it went, or with the reason why not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from sensorium.multimodal.item_codec import decode_item, encode_item
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ItemLayout

LAYOUT = ItemLayout(text="<image>", token_id=3, num_embeds=1)


def make_item(**changes: Any) -> bytes:
    tensor = {"dtype": "float32", "shape": [2, 1], "data": bytes(8), **changes}
    return msgspec.msgpack.encode({"tensors": {"x": tensor}, "layout": None})


@pytest.mark.parametrize("layout", [LAYOUT, None])
def test_an_item_comes_back_as_it_went(layout: ItemLayout | None) -> None:
    kwargs = {
        "a": torch.randn(3, 4),
        "b": torch.tensor([[1, 2]]),
        "c": torch.tensor([True, False]),
        "d": torch.randn(2, 2).to(torch.bfloat16),
        "e": torch.randn(4, 4).t(),
    }
    decoded, own = decode_item(encode_item(kwargs, layout))
    assert own == layout
    assert decoded.keys() == kwargs.keys()
    assert all(torch.equal(decoded[name], tensor) for name, tensor in kwargs.items())


BAD: dict[str, tuple[bytes, str]] = {
    "no msgpack": (b"\xc1", "not a processed media item"),
    "nothing": (b"", "not a processed media item"),
    "a list": (msgspec.msgpack.encode([1]), "not a processed media item"),
    "more than an item": (make_item() + b"\x00", "not a processed media item"),
    "a huge shape": (make_item(shape=[2**62, 2**62]), "does not fit its data"),
    "a huge shape of nothing": (make_item(shape=[0, 2**62], data=b""), "holds nothing"),
    "a negative shape": (make_item(shape=[-2, -1]), "impossible shape"),
    "too many dimensions": (make_item(shape=[1] * 50_000), "50000 dimensions"),
    "too many dimensions of nothing": (make_item(shape=[0] * 50_000, data=b""), "holds nothing"),
    "too many bytes": (make_item(data=bytes(12)), "has 8 bytes, not 12"),
    "too few bytes": (make_item(data=bytes(4)), "does not fit its data"),
    "an unknown dtype": (make_item(dtype="complex64"), "unknown dtype"),
    "no number": (make_item(data=b"\x00\x00\xc0\x7f" * 2), "not finite"),
    "infinity": (make_item(data=b"\x00\x00\x80\x7f" * 2), "not finite"),
    "neither true nor false": (make_item(dtype="bool", data=b"\x00\x02"), "neither true nor false"),
    "too many tensors": (
        msgspec.msgpack.encode(
            {"tensors": {str(i): {"dtype": "int8", "shape": [1], "data": b"1"} for i in range(65)}}
        ),
        "65 tensors",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bytes_that_are_no_item_are_refused(name: str) -> None:
    data, words = BAD[name]
    with pytest.raises(RequestError, match=words) as caught:
        decode_item(data)
    assert len(str(caught.value)) < 500
