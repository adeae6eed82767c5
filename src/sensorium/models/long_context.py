"""Computes long sequences as the model's own `generate` does, or limits their length.

Some models have two sets of rotary factors (rope_type "longrope"), one for short and one for long
sequences. Transformers chooses by the largest position of a call, and here a call is a step of many
requests. But a request must be computed with the factors of its own length: with the short ones up
to `long_after` tokens, and with the long ones for all its tokens when it is longer. The scheduler
restarts a request that crosses this border. Other models can't be computed as in `generate` beyond
some length, which is their context limit.

Invariants:
  1. Inside `choosing`, a token's factors don't depend on the positions of other tokens of the step.
  2. Outside of it, the model computes as Transformers wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from sensorium.layers.kv_layout import LayerSpec
from sensorium.types.errors import ModelError

# In `generate` these models compute a sequence again when it crosses the border. Others continue
# with keys of both kinds, in a mixture that depends on where the prompt ended.
RECOMPUTING = frozenset({"phi3", "phi4_multimodal", "phimoe"})


class LongRope:
    """A switch between the short and the long rotary factors of a decoder ("longrope").

    It replaces the `forward` of every rotary module with two sets of factors. Raise `ModelError` if
    modules change their factors at different lengths.
    """

    def __init__(self, decoder: torch.nn.Module) -> None:
        # The most tokens of a request that uses the short factors. None: there is only one set.
        self.long_after: int | None = None
        self._is_long: torch.Tensor | None = None  # bool [N], while a step is computed
        borders: set[int] = set()
        for module in decoder.modules():
            if found := _find_borders(module):
                borders |= found
                # It is set on the instance, where `Module.__call__` finds it before the class's.
                module.forward = self._wrap(module.forward)
        if len(borders) > 1:
            raise ModelError(
                f"{type(decoder).__name__} changes its rotary factors at different lengths "
                f"({', '.join(map(str, sorted(borders)))}), but only one length is supported"
            )
        if borders:
            (self.long_after,) = borders

    @contextmanager
    def choosing(self, is_long: torch.Tensor | None) -> Iterator[None]:
        """Use the long rotary factors for tokens with a True in `is_long` [N], inside a `with`.

        The other tokens use the short factors. With None, the model chooses the factors itself.
        """
        self._is_long = is_long
        try:
            yield
        finally:
            self._is_long = None

    def _wrap(self, own_forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_long, border = self._is_long, self.long_after
            if is_long is None or border is None:
                return own_forward(x, position_ids, *args, **kwargs)
            # Tokens of short requests lie before the border. The result for others is not used.
            short = own_forward(x, position_ids.clamp(max=border - 1), *args, **kwargs)
            # The model chooses its long factors because of this one position beyond the border.
            beyond = torch.full_like(position_ids[..., :1], border)
            longer = torch.cat([position_ids, beyond], dim=-1)
            long = own_forward(x, longer, *args, **kwargs)
            return tuple(
                torch.where(is_long[:, None], b[..., :-1, :], a)
                for a, b in zip(short, long, strict=True)
            )

        return forward


def _find_borders(module: torch.nn.Module) -> set[int]:
    """Return the lengths in tokens beyond which a module uses long rotary factors, if any."""
    rope_type = getattr(module, "rope_type", None)
    if rope_type == "longrope":
        return {_get_border(module.config.rope_parameters)}  # type: ignore[union-attr]
    if isinstance(rope_type, Mapping):  # kind of layer -> rope type
        return {
            _get_border(module.config.rope_parameters[kind])  # type: ignore[union-attr,index]
            for kind, value in rope_type.items()
            if value == "longrope"
        }
    return set()


def _get_border(rope_parameters: Any) -> int:
    return int(rope_parameters["original_max_position_embeddings"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    num_tokens: int
    reason: str  # a clause that follows "because"


def find_context_limit(
    model: PreTrainedModel, layers: Sequence[LayerSpec], long_after: int | None
) -> ContextLimit | None:
    """Return the lowest limit on the length of a sequence, with its reason, or None if unlimited.

    Beyond such a limit, the results would differ from those of the model's own `generate`.
    """
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
    """Yield the length at which rotary factors change, unless `generate` also recomputes there."""
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
    """Yield a limit if rotary factors depend on a step's longest sequence, and on earlier steps."""
    kinds = [str(getattr(module, "rope_type", "")) for module in decoder.modules()]
    if any("dynamic" in kind for kind in kinds):
        yield ContextLimit(
            num_tokens=int(text_config.max_position_embeddings),
            reason="its rotary factors are dynamic, and depend on other requests beyond that",
        )


def _find_cache_limits(
    text_config: PretrainedConfig, layers: Sequence[LayerSpec]
) -> Iterator[ContextLimit]:
    """Yield a limit for each layer with a cache in Transformers that is shorter than its window.

    Such a cache drops tokens that the layer's mask still shows. So in longer sequences, prompt
    tokens attend to more tokens than output tokens do.
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
