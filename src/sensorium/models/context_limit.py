"""Finds the longest sequence that this engine computes as the model's own `generate` does.

For some models that is less than their config allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from sensorium.layers.kv_layout import LayerSpec
from sensorium.models.long_rope import RECOMPUTING


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    num_tokens: int
    reason: str  # a clause that follows "because"


def find_context_limit(
    model: PreTrainedModel, layers: Sequence[LayerSpec], long_after: int | None
) -> ContextLimit | None:
    """Return the lowest limit of a model, if it has any. `long_after` is that of `LongRope`."""
    text_config = model.config.get_text_config(decoder=True)
    limits = [
        *_find_long_rope_limits(model.config, long_after),
        *_find_dynamic_limits(model.get_decoder(), text_config),
        *_find_cache_limits(text_config, layers),
    ]
    return min(limits, key=lambda limit: limit.num_tokens, default=None)


def _find_long_rope_limits(
    config: PretrainedConfig, long_after: int | None
) -> Iterator[ContextLimit]:
    """Yield a limit at the border of the two sets of factors, unless the model recomputes there.

    The scheduler computes a sequence again that crosses the border. That is right only if the
    model's own class does so too.
    """
    own_border = getattr(config, "original_max_position_embeddings", None)
    is_computed_again = config.model_type in RECOMPUTING and own_border == long_after
    if long_after is not None and not is_computed_again:
        yield ContextLimit(
            num_tokens=long_after,
            reason="in longer sequences the model would mix keys of two sets of rotary factors",
        )


def _find_dynamic_limits(
    decoder: torch.nn.Module, text_config: PretrainedConfig
) -> Iterator[ContextLimit]:
    """Yield a limit if the rotary factors are dynamic.

    Beyond it they depend on the longest sequence of a step, and on earlier steps.
    """
    kinds = [str(getattr(module, "rope_type", "")) for module in decoder.modules()]
    if any("dynamic" in kind for kind in kinds):
        yield ContextLimit(
            num_tokens=int(text_config.max_position_embeddings),
            reason="its rotary factors are dynamic, and depend on other requests beyond that",
        )


def _find_cache_limits(
    text_config: PretrainedConfig, layers: Sequence[LayerSpec]
) -> Iterator[ContextLimit]:
    """Yield a limit for each layer with a cache in Transformers that is shorter than its mask.

    The cache drops tokens that the mask still shows. So in longer sequences, the tokens of a prompt
    attend to more tokens than those of an answer do.
    """
    cached = DynamicCache(config=text_config).layers
    for layer in layers:
        if layer.layer_index >= len(cached) or not cached[layer.layer_index].is_sliding:
            continue
        window = int(cached[layer.layer_index].sliding_window)
        if layer.window is None or layer.window > window:
            yield ContextLimit(
                num_tokens=window,
                reason=f"the model's own cache keeps {window} tokens of layer {layer.layer_index}, "
                "but its mask has no such window",
            )
