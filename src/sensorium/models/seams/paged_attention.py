"""Registers our attention as an implementation that the decoders of Transformers can call.

A decoder that is set to this implementation calls it in every attention layer. The object that
computes attention is a keyword argument of the decoder: in every family tried, decoders pass
unknown arguments on to the attention function. Encoders keep their own attention. Transformers
builds no masks for an implementation that is not in its own list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sensorium.types.errors import ModelError

PAGED_ATTENTION = "sensorium_paged"
# Arguments that change the result and that none of our backends supports.
_UNSUPPORTED = ("softcap", "s_aux")


class AttentionCall(Protocol):
    """An object that computes the attention of every layer in one run of a decoder."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,  # [1, H, N, D], rotary positions applied
        key: torch.Tensor,  # [1, K, N, D]
        value: torch.Tensor,
        *,
        scaling: float | None,  # of the attention scores; None: one over the root of D
    ) -> torch.Tensor:
        """Return the attention output [1, N, H, D of values] of one layer."""


_current: ContextVar[AttentionCall | None] = ContextVar("attention call", default=None)


@contextmanager
def attending(call: AttentionCall) -> Iterator[None]:
    """Let layers that get no attention call from their decoder use `call`, inside a `with`."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    attention_call: AttentionCall | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if attention_mask is not None:
        # Transformers makes no mask for this implementation, so the layer has made it itself.
        raise ModelError(
            f"{type(module).__name__} makes an attention mask of its own, which is not supported"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} needs attention with {name!r}, which no backend supports"
            )
    call = attention_call or _current.get()
    if call is None:
        raise ModelError(f"{type(module).__name__} runs outside of a step")
    layer_index: Any = module.layer_idx
    output = call.attend(layer_index, query, key, value, scaling=scaling)
    return output, None


ALL_ATTENTION_FUNCTIONS.register(PAGED_ATTENTION, _paged_attention)
