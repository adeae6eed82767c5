"""What is learned of a processor's items holds for all of them, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sensorium.models.loading import load_config
from sensorium.multimodal.processing.item_spec import ItemSpecs
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import RequestError

FAMILIES = (
    *("qwen2_5_omni", "qwen3_vl", "gemma3", "gemma4", "idefics3", "internvl"),
    *("llava_next", "llava_onevision", "audioflamingo3", "smolvlm", "voxtral"),
)


@pytest.fixture(scope="module")
def make_processor(tiny_model: Callable[[str], str]) -> Callable[[str], MultiModalProcessor]:
    def make(family: str) -> MultiModalProcessor:
        directory = tiny_model(family)
        return MultiModalProcessor(directory, load_config(directory, trust_remote_code=False))

    return make


def make_media(modality: str, rate: int, rng: np.random.Generator) -> Any:
    if modality == "audio":
        return (0.1 * rng.standard_normal(int(rate * rng.uniform(0.3, 5)))).astype(np.float32)
    height, width = (int(size) for size in rng.integers(28, 500, 2))
    frames = () if modality == "image" else (int(rng.integers(2, 9)),)
    return rng.integers(0, 256, (*frames, height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_item_of_the_processor_is_accepted(
    make_processor: Callable[[str], MultiModalProcessor], family: str
) -> None:
    processor, rng = make_processor(family), np.random.default_rng(11)
    specs = ItemSpecs(processor)
    for modality in processor.modalities:
        for _ in range(6):
            media = make_media(modality, processor.sampling_rate or 0, rng)
            item = processor.process_item(modality, media, {})
            assert item.layout is not None
            specs.check(modality, item.kwargs, item.layout.num_embeds)
            processor.check_layout(modality, item.layout)


def test_a_layout_with_too_much_text_is_not_tokenised(
    make_processor: Callable[[str], MultiModalProcessor], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = make_processor("qwen2_vl")
    layout = processor.make_plain_layout("image", 4)
    processor.check_layout("image", layout)
    monkeypatch.delattr(processor, "tokenizer")
    with pytest.raises(RequestError, match="characters of text"):
        processor.check_layout("image", replace(layout, text=layout.text + "x" * 10_000))


# By family and modality: a tensor, what is done to it, and what is said of it.
Change = Callable[[torch.Tensor], torch.Tensor]
BAD: dict[str, tuple[str, str, str, Change, str]] = {
    "patches of another width": (
        *("qwen2_5_omni", "image", "pixel_values"),
        lambda t: t[:, :-1],
        "must be torch.float32 of shape",
    ),
    "fewer patches": (
        *("qwen2_5_omni", "image", "pixel_values"),
        lambda t: t[4:],
        "do not give the number of rows",
    ),
    "a grid of two images": (
        *("qwen2_5_omni", "image", "image_grid_thw"),
        lambda t: t.repeat(2, 1),
        "must be torch.int64 of shape",
    ),
    "a grid that can't be merged": (
        *("qwen2_5_omni", "image", "image_grid_thw"),
        lambda t: torch.tensor([[1, 3, int(t.prod()) // 3]]),
        "must be multiples of 2",
    ),
    "other bands": (
        *("qwen2_5_omni", "audio", "input_features"),
        lambda t: t[:, :64],
        "must be torch.float32 of shape",
    ),
    "a mask that counts": (
        *("qwen2_5_omni", "audio", "feature_attention_mask"),
        lambda t: t * 10**6,
        "zeros and ones",
    ),
    "windows without a mask": (
        *("audioflamingo3", "audio", "input_features"),
        lambda t: t.repeat(2, 1, 1),
        "does not fit",
    ),
    "a place beyond the table": (
        *("gemma4", "image", "image_position_ids"),
        lambda t: t + 10**6,
        "positions below",
    ),
    "more frames than are counted": (
        *("gemma4", "video", "num_frames_per_video"),
        lambda t: t + 1,
        "do not give the number of rows",
    ),
    "tiles of another size": (
        *("internvl", "image", "pixel_values"),
        lambda t: t[..., :-1],
        "must be torch.float32 of shape",
    ),
    "a tile too many": (
        *("internvl", "image", "pixel_values"),
        lambda t: torch.cat((t, t[:1])),
        "embeddings, not",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_items_that_the_processor_never_makes_are_refused(
    make_processor: Callable[[str], MultiModalProcessor], name: str
) -> None:
    family, modality, tensor, change, words = BAD[name]
    processor, rng = make_processor(family), np.random.default_rng(12)
    media: Any = rng.integers(0, 256, (4, 112, 168, 3), dtype=np.uint8)
    if modality == "audio":
        media = make_media(modality, processor.sampling_rate or 0, rng)
    elif modality == "image":
        media = media[0]
    item = processor.process_item(modality, media, {})
    assert item.layout is not None
    kwargs = {**item.kwargs, tensor: change(item.kwargs[tensor])}
    with pytest.raises(RequestError, match=words) as caught:
        ItemSpecs(processor).check(modality, kwargs, item.layout.num_embeds)
    assert tensor in str(caught.value)
