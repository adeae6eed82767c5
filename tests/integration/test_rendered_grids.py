"""Prompts that were rendered elsewhere, for a model with two kinds of media.

Its encoder believes what an item declares of its own size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sensorium import RequestError
from sensorium.engine.inputs.input_processor import ProcessedRequest
from tests.integration.neighbours import PARAMS, Neighbours, make_prompt
from tests.parity.cases import make_image, make_video

FAMILY = "qwen2_5_vl"
NeighboursOf = Callable[[str], Neighbours]


@pytest.fixture
def neighbours(neighbours_of: NeighboursOf) -> Neighbours:
    return neighbours_of(FAMILY)


def render(neighbours: Neighbours, modality: str, media: object) -> ProcessedRequest:
    marker = neighbours.llm.input_processor.processor.get_marker(modality)
    prompt = {"prompt": f"{marker} what?", "multi_modal_data": {modality: [media]}}
    return neighbours.llm.input_processor.process("r", prompt, PARAMS, skip_mm_cache=True)  # type: ignore[arg-type]


def make_rendered(rendered: ProcessedRequest, modality: str, **fields: Any) -> dict[str, Any]:
    (feature,) = rendered.request.mm_features
    return {
        "prompt_token_ids": list(rendered.request.prompt_token_ids),
        "mm_hashes": {modality: [feature.mm_hash]},
        "mm_placeholders": {modality: [feature.mm_position]},
        **fields,
    }


@pytest.mark.parametrize("change", [lambda grid: grid * 1000, lambda grid: -grid, lambda g: g * 0])
def test_a_grid_that_is_not_that_of_the_pixels_is_refused_before_it_is_encoded(
    neighbours: Neighbours, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    rendered = render(neighbours, "image", make_image(60, 60, seed=7))
    kwargs = dict(rendered.items[0].handle.kwargs or {})
    kwargs["image_grid_thw"] = change(kwargs["image_grid_thw"])
    prompt = make_rendered(
        rendered, "image", mm_hashes={"image": ["other"]}, mm_kwargs={"image": [kwargs]}
    )
    assert "image_grid_thw do not give the number of rows" in neighbours.fail(prompt)


def test_the_hash_of_an_image_is_not_accepted_for_a_video(neighbours: Neighbours) -> None:
    image = make_image(60, 60, seed=8)
    neighbours.llm.generate(make_prompt(FAMILY, image), PARAMS, use_tqdm=False)
    mm_hash = render(neighbours, "image", image).request.mm_features[0].mm_hash
    video = render(neighbours, "video", make_video(4, 60, 60, seed=9))
    prompt = make_rendered(video, "video", mm_hashes={"video": [mm_hash]})
    with pytest.raises(RequestError, match="another item, of modality image"):
        neighbours.llm.generate(prompt, PARAMS, use_tqdm=False)
