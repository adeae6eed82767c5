"""Decides from its config and class whether a model can be run, before any weight is read."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_REASONS = {
    "linear_attention": "it has linear attention, whose state is not kept in pages",
    "chunked_attention": "it attends in chunks, which no attention backend here has",
    "conv": "it has convolutions between its attention layers, whose state is not kept in pages",
}


def find_refusal(model_class: Any, config: PretrainedConfig) -> str | None:
    """Return why a model can't be run, or `None` if it may be tried.

    The reason is a phrase that follows the model's name.
    """
    text_config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return "is an encoder-decoder model: not supported yet"
    if not hasattr(model_class, "generate"):
        return "can't be run: it does not generate text"
    if (kind := _find_unknown_layer(text_config)) is not None:
        reason = _REASONS.get(kind, f"it has layers of the kind {kind!r}")
        return f"can't be run: {reason}"
    if getattr(text_config, "cross_attention_layers", None):
        return "can't be run: it has cross-attention inside its decoder"
    if not _supports_attention(model_class, config):
        return "can't be run: its decoder doesn't use Transformers' attention interface"
    return None


def _find_unknown_layer(text_config: PretrainedConfig) -> str | None:
    kinds = getattr(text_config, "layer_types", None) or ()
    return next((kind for kind in kinds if kind not in _KNOWN_LAYERS), None)


def _supports_attention(model_class: Any, config: PretrainedConfig) -> bool:
    """Return whether a model uses Transformers' attention interface.

    Some classes don't declare it themselves, but their decoders do.
    """
    if getattr(model_class, "_supports_attention_backend", False):
        return True
    with torch.device("meta"):
        decoder = model_class(config).get_decoder()
    return bool(getattr(decoder, "_supports_attention_backend", False))
