"""What a mask means is found by asking it about positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils as masks

from sensorium.models.probes import MaskProbe, read_mask
from sensorium.types.errors import ModelError


def make_mask(answered: Any) -> torch.Tensor:
    """A mask as Transformers makes it for the probe."""
    function = masks.ALL_MASK_ATTENTION_FUNCTIONS["sensorium_probe"]
    mask: torch.Tensor = function(
        batch_size=1, q_length=2, kv_length=2, q_offset=0, mask_function=answered, use_vmap=False
    )
    return mask


class Layer(torch.nn.Module):
    layer_idx = 3


def test_a_causal_mask_has_no_window() -> None:
    answer = read_mask(masks.causal_mask_function)
    assert (answer.window, answer.fault) == (None, None)


@pytest.mark.parametrize("window", [1, 2, 3, 12, 63, 64, 4096, 262_144])
def test_a_window_is_found_whatever_its_size(window: int) -> None:
    answer = read_mask(masks.sliding_window_causal_mask_function(window))
    assert (answer.window, answer.fault) == (window, None)


@pytest.mark.parametrize("chunk_size", [2, 3, 7, 64, 100, 8192])
def test_chunks_are_no_window(chunk_size: int) -> None:
    function = masks.chunked_causal_mask_function(chunk_size, torch.zeros(1, dtype=torch.long))
    assert read_mask(function).fault == "is neither causal nor a sliding window"


@pytest.mark.parametrize(
    "function",
    [
        masks.bidirectional_mask_function,
        masks.sliding_window_bidirectional_mask_function(5),
        masks.or_masks(masks.causal_mask_function, lambda _, __, q, kv: (q < 7) & (kv < 7)),
    ],
    ids=["both directions", "a window in both directions", "a prefix"],
)
def test_a_look_ahead_is_a_fault(function: Any) -> None:
    assert read_mask(function).fault == "lets tokens attend to later ones"


@pytest.mark.parametrize(
    "function",
    [
        masks.and_masks(masks.causal_mask_function, lambda _, __, q, kv: (q - kv) % 2 == 0),
        masks.and_masks(masks.causal_mask_function, lambda _, __, q, kv: (kv < 4) | (q - kv < 9)),
        masks.and_masks(masks.causal_mask_function, lambda _, __, q, kv: q != kv),
        lambda _, __, q, kv: (q < 0) & (kv < 0),
    ],
    ids=["every second", "sinks", "not itself", "nothing"],
)
def test_other_patterns_are_a_fault(function: Any) -> None:
    assert read_mask(function).fault == "is neither causal nor a sliding window"


def test_a_mask_defined_for_two_tokens_only_is_a_fault() -> None:
    groups = torch.tensor([[-1, -1]])
    function = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(groups))
    assert "can't be read (IndexError" in str(read_mask(function).fault)


def test_a_layer_gets_the_window_of_its_mask() -> None:
    probe = MaskProbe()
    mask = make_mask(masks.sliding_window_causal_mask_function(5))
    probe.note(Layer(), mask, is_causal=True, window=None)
    assert probe.windows == {3: 5}


def test_a_layer_without_a_mask_has_the_window_that_it_asks_for() -> None:
    probe = MaskProbe()
    probe.note(Layer(), None, is_causal=True, window=5)
    assert probe.windows == {3: 5}


@pytest.mark.parametrize(
    ("mask", "is_causal", "window", "message"),
    [
        (torch.ones(1, 1, 2, 2), True, None, r"Layer \(layer 3\) is made or changed by the layer"),
        (None, False, None, r"Layer \(layer 3\) lets tokens attend to later ones"),
        (make_mask(masks.causal_mask_function), True, 7, "a window of 7, but its mask has none"),
        (
            make_mask(masks.sliding_window_causal_mask_function(5)),
            True,
            7,
            "a window of 7, but its mask has one of 5",
        ),
        (
            make_mask(masks.bidirectional_mask_function),
            True,
            None,
            "lets tokens attend to later ones",
        ),
    ],
)
def test_a_layer_with_an_unreadable_mask_is_refused(
    mask: torch.Tensor | None, is_causal: bool, window: int | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        MaskProbe().note(Layer(), mask, is_causal=is_causal, window=window)
