"""Where Transformers' attention layers meet ours: one function, registered under a name of our own.

A model's decoder is told to use it and calls it in every attention layer. What to do travels with
the call: the decoder hands unknown keyword arguments down to the attention function, in every
family tried. Encoders keep their attention. Transformers builds no masks for a name that it doesn't
know.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sensorium.types.errors import ModelError

PAGED_ATTENTION = "sensorium_paged"
# Arguments that change the result and that no backend of ours honours.
_UNSUPPORTED = ("softcap", "s_aux")


class AttentionCall(Protocol):
    """What runs in place of a decoder's attention."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,  # [1, H, N, D], rotary positions applied
        key: torch.Tensor,  # [1, K, N, D]
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """[1, N, H, D of values]"""


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    attention_call: AttentionCall,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if attention_mask is not None:
        # Transformers makes none for us: it is the layer's own work.
        raise ModelError(
            f"{type(module).__name__} makes an attention mask of its own: not supported"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} needs attention with {name!r}: not supported"
            )
    output = attention_call.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query,
        key,
        value,
        scaling=scaling,
        window=sliding_window,
    )
    return output, None


ALL_ATTENTION_FUNCTIONS.register(PAGED_ATTENTION, _paged_attention)
