"""Embeddings that callers bring: what they may look like, in process and on the wire."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
import torch

from sensorium.multimodal.item_codec import (
    MAX_EMBEDS,
    PrecomputedEmbeds,
    decode_embeds,
)
from sensorium.multimodal.names import MediaHasher
from sensorium.types.errors import RequestError

TENSOR = {"dtype": "float32", "shape": [2, 3], "data": torch.arange(6.0).numpy().tobytes()}


def encode(**changes: Any) -> bytes:
    return msgspec.msgpack.encode({"tensors": {"embeds": {**TENSOR, **changes}}})


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_tensor_comes_out_as_it_went_in(dtype: str) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).to(getattr(torch, dtype))
    data = tensor.view(torch.uint8).numpy().tobytes()
    decoded = decode_embeds(encode(dtype=dtype, data=data)).tensor
    assert decoded.dtype is tensor.dtype
    assert torch.equal(decoded, tensor)


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "they must be msgpack"),
        (pickle.dumps({"tensors": {}}), "they must be msgpack"),
        (msgspec.msgpack.encode([1]), "they must be msgpack"),
        (msgspec.msgpack.encode({"tensors": {"\ufffd": 1}}), "they must be msgpack"),
        (msgspec.msgpack.encode({"tensors": {}}), "one tensor of the name 'embeds'"),
        (
            msgspec.msgpack.encode({"tensors": {"embeds": TENSOR, "more": TENSOR}}),
            "one tensor of the name 'embeds'",
        ),
        (encode(dtype="object"), "unknown dtype 'object'"),
        (encode(dtype="int64", shape=[1, 3]), "floating-point numbers, not torch.int64"),
        (encode(shape=[6]), r"shape \[number, width\], not \[6\]"),
        (encode(shape=[0, 2**60]), r"shape \[number, width\]"),
        (encode(shape=[-2, -3]), r"shape \[number, width\]"),
        (encode(shape=[2**40, 2**40]), "does not fit its data"),
        (encode(shape=[1, 3]), "has 12 bytes, not 24"),
    ],
)
def test_bytes_that_are_no_embeddings_are_refused(encoded: bytes, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        decode_embeds(encoded)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        ([[1.0]], "a plain tensor"),
        (torch.ones(2, 3, device="meta"), "a plain tensor"),
        (torch.ones(2, 3).to_sparse(), "a plain tensor"),
        (torch.ones(2, 3, dtype=torch.long), "floating-point numbers"),
        (torch.ones(2, 3, dtype=torch.cfloat), "floating-point numbers"),
        (torch.ones(2, 3).to(torch.float8_e4m3fn), "floating-point numbers"),
        (torch.ones(3), "shape"),
        (torch.ones(1, 2, 3), "shape"),
        (torch.ones(0, 3), "shape"),
        (torch.ones(3, 0), "shape"),
        (torch.ones(MAX_EMBEDS + 1, 1), "shape"),
    ],
)
def test_embeddings_that_no_encoder_gives_are_refused(tensor: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        PrecomputedEmbeds(tensor)


def test_embeddings_are_never_named_as_pixels_of_the_same_numbers() -> None:
    hasher, tensor = MediaHasher(), torch.ones(2, 3)
    name = hasher.digest_source(PrecomputedEmbeds(tensor))
    assert name == hasher.digest_source(PrecomputedEmbeds(tensor.clone()))
    others = [tensor, PrecomputedEmbeds(tensor.double()), PrecomputedEmbeds(tensor.reshape(3, 2))]
    assert name not in map(hasher.digest_source, others)
