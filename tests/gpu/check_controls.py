"""Deliberate mistakes: a comparison in bfloat16 that doesn't see them is worth nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sensorium.layers.attention.backend import StepLayout
from sensorium.layers.attention.torch_backend import TorchPagedAttention

from .check_bfloat16 import check_decoder

_prepare = TorchPagedAttention.prepare
_attend = TorchPagedAttention.attend


def _prepare_wider_windows(self: TorchPagedAttention, layout: StepLayout) -> None:
    groups = (replace(group, window=group.window and group.window + 1) for group in layout.groups)
    _prepare(self, replace(layout, groups=tuple(groups)))


def _prepare_without_spans(self: TorchPagedAttention, layout: StepLayout) -> None:
    _prepare(self, replace(layout, attend_until=None))


def _attend_sharper(
    self: TorchPagedAttention, *tensors: Any, scaling: float | None
) -> torch.Tensor:
    assert scaling is not None
    return _attend(self, *tensors, scaling=scaling * 1.1)


MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "a window too wide by one": ("prepare", _prepare_wider_windows),
    "spans attended causally": ("prepare", _prepare_without_spans),
    "scaled by 1.1": ("attend", _attend_sharper),
}


def check_control(mistake: str) -> str:
    """Gemma 3 has windows, spans and a scale of its own."""
    name, replacement = MISTAKES[mistake]
    original = getattr(TorchPagedAttention, name)
    setattr(TorchPagedAttention, name, replacement)
    try:
        check_decoder("gemma3", "torch")
    except AssertionError as error:
        return f"seen: {error}"
    finally:
        setattr(TorchPagedAttention, name, original)
    raise AssertionError("no comparison saw it")
