"""Adds the output of attention to a layer's input and normalises the sum, in one kernel.

The sum and the norm after it are part of a layer, so its whole `forward` is replaced, if the layer
is of the common kind: norm, attention, sum, norm, MLP, sum. To find that out, both forms are run
with a stand-in for attention that records its arguments. The results and the recorded arguments
must be the same.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from sensorium.models.seams.comparing import get_distance, is_rounding, make_rows

logger = logging.getLogger(__name__)

# Usual names of the norm, the attention, the second norm and the MLP of a layer.
_NAMES = (
    ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    ("norm1", "attn", "norm2", "mlp"),
)

AddAndNormalize = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LayerParts(NamedTuple):
    """The norms, the attention and the MLP of a layer, in the order in which they are computed."""

    first_norm: nn.Module
    attention: nn.Module
    second_norm: nn.Module
    mlp: nn.Module


def find_parts(layer: nn.Module) -> LayerParts | None:
    """Return the parts of a layer, found by their usual names, or None if it lacks any of them."""
    children = dict(layer.named_children())
    for names in _NAMES:
        if children.keys() >= set(names):
            return LayerParts(*(children[name] for name in names))
    return None


def make_forward(
    layer: nn.Module, parts: LayerParts, add_and_normalize: AddAndNormalize
) -> Callable[..., torch.Tensor] | None:
    """Return a `forward` with fewer kernels, or None if it differs from the layer's own."""
    parameters = list(inspect.signature(layer.forward).parameters.values())
    named = [p for p in parameters[1:] if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    names = [p.name for p in named]
    defaults = {p.name: p.default for p in named if p.default is not inspect.Parameter.empty}

    def forward(hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        given = dict(zip(names, arguments, strict=False))
        attended = parts.attention(
            parts.first_norm(hidden_states), **{**defaults, **given, **options}
        )
        if isinstance(attended, tuple):
            attended = attended[0]
        total, normalized = add_and_normalize(hidden_states, attended)
        return total + parts.mlp(normalized)

    weight: torch.Tensor = parts.second_norm.weight  # type: ignore[assignment]
    x = make_rows(weight, len(weight))[None]
    # Any objects will do as arguments: they only have to reach attention unchanged.
    takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    options = {name: object() for name in (*names, *(["something_else"] if takes_more else []))}
    try:
        expected, theirs = _run(layer.forward, parts.attention, x, options)
        found, ours = _run(forward, parts.attention, x, options)
    except Exception:  # a layer that needs other arguments is of another kind
        logger.debug("%s was not tried", type(layer).__name__, exc_info=True)
        return None
    is_same = isinstance(expected, torch.Tensor) and expected.shape == found.shape
    if not is_same or theirs != ours or not is_rounding(get_distance(found, expected), x.dtype):
        return None
    return forward


def _run(
    forward: Callable[..., Any], attention: nn.Module, x: torch.Tensor, options: Mapping[str, Any]
) -> tuple[Any, list[dict[str, Any]]]:
    """Run a layer with a stand-in for attention; return its result and attention's arguments."""
    calls: list[dict[str, Any]] = []
    is_tuple = _returns_tuple(attention)

    def attend(hidden_states: torch.Tensor, **given: Any) -> Any:
        calls.append(given)
        attended = hidden_states.roll(1, dims=-1) * 0.7  # any output that differs from the input
        return (attended, None) if is_tuple else attended

    with _replaced(attention, attend):
        return forward(x.clone(), **options), calls


def _returns_tuple(attention: nn.Module) -> bool:
    annotation = inspect.signature(type(attention).forward).return_annotation
    return "tuple" in str(annotation).lower()


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
