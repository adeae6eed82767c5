"""Learns from a decoder's own masks which positions each of its layers attends to.

Transformers composes a mask as a function of two positions and hands it to the attention
implementation. For an implementation that only this module uses, the function is asked about chosen
positions, so that a window is found in whatever way the model expresses it. Its mask tensors carry
the answer to the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sensorium.types.errors import ModelError

PROBE_ATTENTION = "sensorium_probe"
# A position beyond every context. It is odd and prime: no multiple of a chunk.
_FAR = 1_000_003
_ANSWER = "sensorium_answer"  # the attribute of a mask tensor that holds what was read

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskAnswer:
    """What a mask lets a position see."""

    window: int | None = None  # the last positions that are seen, its own included; None: all
    fault: str | None = None  # why the mask can't be had from our attention; None: it can


class MaskProbe:
    """Notes the mask of every layer of a decoder that runs with `PROBE_ATTENTION`."""

    def __init__(self) -> None:
        self._windows: dict[int, int | None] = {}

    @property
    def windows(self) -> dict[int, int | None]:
        """Layer index -> its window."""
        return dict(self._windows)

    def note(
        self,
        module: torch.nn.Module,
        mask: torch.Tensor | None,
        *,
        is_causal: bool,
        window: int | None,  # that the layer asks its attention function for
    ) -> None:
        """Note a layer's window, or raise a `ModelError` if its mask is not supported."""
        answer = MaskAnswer(window=window)
        if mask is not None:
            answer = getattr(
                mask, _ANSWER, MaskAnswer(fault="is made or changed by the layer itself")
            )
        elif not is_causal:
            answer = MaskAnswer(fault="lets tokens see later ones")
        layer_index: int = module.layer_idx  # type: ignore[assignment]
        name = f"{type(module).__name__} (layer {layer_index})"
        if answer.fault is not None:
            raise ModelError(f"the attention mask of {name} {answer.fault}: not supported")
        if window is not None and window != answer.window:
            raise ModelError(
                f"{name} asks for a window of {window}, but its mask "
                f"{'has none' if answer.window is None else f'has one of {answer.window}'}: "
                "not supported"
            )
        self._windows[layer_index] = answer.window


def read_mask(mask_function: MaskFunction) -> MaskAnswer:
    """Find out what a mask function means by asking it about chosen positions."""
    zero = torch.tensor(0)

    def sees(query: int, key: int) -> bool:
        # Scalars on the CPU: an index that is out of range raises, also for tensors on a GPU.
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    try:
        return _read(sees)
    except Exception as error:  # a model's own function may raise anything
        return MaskAnswer(fault=f"can't be read ({type(error).__name__}: {error})")


def _read(sees: Callable[[int, int], bool]) -> MaskAnswer:
    if any(sees(query, query + step) for query in (0, 1, 5, _FAR) for step in (1, 2, 9)):
        return MaskAnswer(fault="lets tokens see later ones")
    window = None if sees(_FAR, 0) else _find_window(sees)
    for query in _choose_queries(window):
        for distance in _choose_distances(window):
            is_inside = window is None or distance < window
            if distance <= query and sees(query, query - distance) != is_inside:
                return MaskAnswer(fault="is neither causal nor a sliding window")
    return MaskAnswer(window=window)


def _find_window(sees: Callable[[int, int], bool]) -> int:
    """Bisect for the distance from which on a far position sees nothing."""
    low, high = 0, _FAR  # distances that are seen and not seen
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sees(_FAR, _FAR - middle) else (low, middle)
    return high


def _choose_queries(window: int | None) -> list[int]:
    """Choose positions around the first ones, the window's border and far away."""
    size = window or 1
    near = [0, 1, 2, 3, 63, 64, 1000, 4096, 8191, 8192, 99_991, _FAR - 1, _FAR]
    return [*near, *(size * factor + step for factor in (1, 2, 3) for step in (-1, 0, 1))]


def _choose_distances(window: int | None) -> list[int]:
    size = window or 1
    return [0, 1, 2, 3, 64, 1000, 8192, 99_991, size - 1, size, size + 1, 2 * size]


def _make_probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor:
    """Make a mask that carries its meaning. Versions of Transformers differ in other arguments."""
    del kwargs
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    setattr(mask, _ANSWER, read_mask(mask_function))
    return mask


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    attention_call: MaskProbe,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,  # noqa: ARG001
) -> tuple[torch.Tensor, None]:
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))  # as Transformers' own attention
    attention_call.note(module, attention_mask, is_causal=is_causal, window=sliding_window)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


ALL_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, _probe_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, _make_probe_mask)
