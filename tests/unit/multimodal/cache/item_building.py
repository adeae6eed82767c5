"""Small items with a content that follows from their hash."""

from __future__ import annotations

import hashlib

import torch

from sensorium.multimodal.cache.mirror import MirrorReceiver, MirrorSender
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, ProcessedItem

LAYOUT = ItemLayout(text="<image><image>", token_id=7, num_embeds=2)


def make_kwargs(mm_hash: str, num_bytes: int = 128) -> MultiModalKwargsItem:
    """Make tensors of `num_bytes` bytes, a multiple of 64, the least that a tensor takes."""
    content = bytearray(hashlib.shake_256(mm_hash.encode()).digest(num_bytes))
    if num_bytes < 128:
        return {"pixels": torch.frombuffer(content, dtype=torch.uint8)} if content else {}
    return {
        "pixels": torch.frombuffer(content[64:], dtype=torch.float16).reshape(2, -1),
        "grid": torch.frombuffer(content[:64], dtype=torch.int32),
    }


def make_item(
    mm_hash: str, num_bytes: int = 128, *, layout: ItemLayout | None = LAYOUT
) -> ProcessedItem:
    return ProcessedItem(
        modality="image", mm_hash=mm_hash, kwargs=make_kwargs(mm_hash, num_bytes), layout=layout
    )


def get_sent_sizes(sender: MirrorSender) -> dict[str, int]:
    """Return `mm_hash` -> bytes of what the core will keep after all messages so far."""
    with sender._lock:
        return {e.mm_hash: e.num_bytes for e in sender._lru if e.sent_in is not None}


def get_kept_sizes(receiver: MirrorReceiver) -> dict[str, int]:
    """Return `mm_hash` -> bytes of what the core keeps."""
    return {mm_hash: get_num_bytes(kwargs) for mm_hash, kwargs in receiver._items.items()}


def is_same(kwargs: MultiModalKwargsItem, other: MultiModalKwargsItem) -> bool:
    """Return whether two items are equal, bit for bit."""
    return kwargs.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype
        and tensor.shape == other[name].shape
        and tensor.numpy().tobytes() == other[name].numpy().tobytes()
        for name, tensor in kwargs.items()
    )
