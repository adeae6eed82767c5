"""Tensors that may be kept: none of them holds more memory than its own values need."""

from __future__ import annotations

from sensorium.types.multimodal import MultiModalKwargsItem


def own_tensors(kwargs: MultiModalKwargsItem) -> MultiModalKwargsItem:
    """The same item; what is a part of a larger tensor becomes a copy.

    A view of foreign memory (`torch.frombuffer`) doesn't show how large that is. Whoever makes such
    views gives each item a block of its own, as `item_codec` does.
    """
    return {
        name: tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()
        for name, tensor in kwargs.items()
    }
