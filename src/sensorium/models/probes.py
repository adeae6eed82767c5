"""Finds what a decoder's layers store and attend to, from small runs instead of its config.

Transformers composes a mask as a function of two positions, and passes it to the attention
implementation. The one that is registered here calls this function for chosen positions. So it
finds a window, however the model expresses it. The result is attached to the mask tensor,
which brings it to the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sensorium.layers.kv_layout import LayerSpec
from sensorium.types.errors import ModelError

PROBE_ATTENTION = "sensorium_probe"
# A position beyond every context. It is a prime, so it is no multiple of a chunk's length.
_FAR = 1_000_003
_ANSWER = "sensorium_answer"  # the attribute of a mask tensor that holds the `MaskAnswer`

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class KVProbe:
    """An `AttentionCall` that records the shapes of each layer's keys and values.

    It returns zeros. Layers that share keys and values pass the very same tensors, so sharing is
    found by their addresses.
    """

    def __init__(self) -> None:
        # Addresses of keys and values -> the first layer that passed them. The tensors are kept
        # alive, because later ones could get the address of one that was freed.
        self._sources: dict[tuple[int, int], int] = {}
        self._tensors: list[torch.Tensor] = []
        self._specs: dict[int, LayerSpec] = {}

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,  # noqa: ARG002
    ) -> torch.Tensor:
        if layer_index in self._specs:
            # Keys and values are stored by layer, so the second call would overwrite the first.
            raise ModelError(
                f"layer {layer_index} attends more than once in a forward pass, "
                "which is not supported"
            )
        self._tensors += (key, value)
        addresses = (key.data_ptr(), value.data_ptr())
        self._specs[layer_index] = LayerSpec(
            layer_index=layer_index,
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            source=self._sources.setdefault(addresses, layer_index),
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(self._specs[index] for index in sorted(self._specs))


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskAnswer:
    """The positions that an attention mask lets a token attend to, or why it is not supported."""

    # The number of positions that are attended to, the token's own included. None: all before it.
    window: int | None = None
    fault: str | None = None  # why our attention can't apply this mask; None: it can


class MaskProbe:
    """A recorder of each layer's window, passed to a decoder that runs with `PROBE_ATTENTION`."""

    def __init__(self) -> None:
        self.windows: dict[int, int | None] = {}  # layer index -> its window

    def note(
        self,
        module: torch.nn.Module,  # the attention module of the layer
        mask: torch.Tensor | None,  # None: attention must be causal
        *,
        is_causal: bool,
        window: int | None,  # the window that the layer passes to its attention function
    ) -> None:
        """Record the window of a layer, or raise a `ModelError` if its mask is not supported."""
        answer = MaskAnswer(window=window)
        if mask is not None:
            answer = getattr(
                mask, _ANSWER, MaskAnswer(fault="is made or changed by the layer itself")
            )
        elif not is_causal:
            answer = MaskAnswer(fault="lets tokens attend to later ones")
        layer_index: int = module.layer_idx  # type: ignore[assignment]
        name = f"{type(module).__name__} (layer {layer_index})"
        if answer.fault is not None:
            raise ModelError(
                f"the attention mask of {name} {answer.fault}; "
                "only causal masks and sliding windows are supported"
            )
        if window is not None and window != answer.window:
            raise ModelError(
                f"{name} asks for a window of {window}, but its mask "
                f"{'has none' if answer.window is None else f'has one of {answer.window}'}; "
                "only a mask with the same window is supported"
            )
        self.windows[layer_index] = answer.window


def read_mask(mask_function: MaskFunction) -> MaskAnswer:
    """Return which positions a mask function lets a token attend to.

    A mask function gets batch, head, query and key positions as tensors, and returns whether the
    query attends to the key. If it is neither causal nor a sliding window, or raises an error, the
    answer has a `fault`.
    """
    zero = torch.tensor(0)

    def sees(query: int, key: int) -> bool:
        # With scalars on the CPU, an index out of range raises an error even if the function
        # indexes a tensor on a GPU.
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    try:
        return _read(sees)
    except Exception as error:  # a model's own function may raise anything
        return MaskAnswer(fault=f"can't be read ({type(error).__name__}: {error})")


def _read(sees: Callable[[int, int], bool]) -> MaskAnswer:
    if any(sees(query, query + step) for query in (0, 1, 5, _FAR) for step in (1, 2, 9)):
        return MaskAnswer(fault="lets tokens attend to later ones")
    window = None if sees(_FAR, 0) else _find_window(sees)
    for query in _choose_queries(window):
        for distance in _choose_distances(window):
            is_inside = window is None or distance < window
            if distance <= query and sees(query, query - distance) != is_inside:
                return MaskAnswer(fault="is neither causal nor a sliding window")
    return MaskAnswer(window=window)


def _find_window(sees: Callable[[int, int], bool]) -> int:
    """Return the smallest distance that a token does not attend to, by bisection from `_FAR`."""
    low, high = 0, _FAR  # the distance `low` is attended to, and `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sees(_FAR, _FAR - middle) else (low, middle)
    return high


def _choose_queries(window: int | None) -> list[int]:
    """Return positions at the beginning, around multiples of the window, and far away."""
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
    **_kwargs: Any,  # versions of Transformers differ in them
) -> torch.Tensor:
    """Return a mask of ones with its `MaskAnswer` attached; Transformers calls this function."""
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
        is_causal = bool(getattr(module, "is_causal", True))  # as in Transformers' own attention
    attention_call.note(module, attention_mask, is_causal=is_causal, window=sliding_window)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


ALL_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, _probe_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, _make_probe_mask)
