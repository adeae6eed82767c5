"""A caller's prompt is read once, into a typed value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sensorium.multimodal.media import MediaItem
from sensorium.render.prompts import EnginePrompt, RenderedMedia, read_prompt
from sensorium.types.errors import RequestError


@pytest.mark.parametrize("rate", [16_000, 16_000.0, np.int64(16_000), np.float32(16_000)])
def test_samples_with_their_rate_are_one_audio_item(rate: Any) -> None:
    audio = (np.zeros(4, dtype=np.float32), rate)
    read = read_prompt({"prompt": "a", "multi_modal_data": {"audio": audio}})
    assert [item.media for item in read.media] == [audio]


def test_token_ids_that_cannot_fit_are_refused_unseen() -> None:
    with pytest.raises(RequestError, match="the prompt has 8 tokens, but the context holds 8"):
        read_prompt(["no id"] * 8, max_model_len=8)  # type: ignore[arg-type]
    assert read_prompt([1] * 7, max_model_len=8) == EnginePrompt(token_ids=[1] * 7)


def test_items_have_their_places_and_uuids() -> None:
    read = read_prompt(
        {
            "prompt": "a",
            "multi_modal_data": {"image": ["x", None], "video": "y"},
            "multi_modal_uuids": {"image": [None, "u"]},
        }
    )
    assert read.media == (
        MediaItem(path=("multi_modal_data", "image", 0), modality="image", media="x"),
        MediaItem(path=("multi_modal_data", "image", 1), modality="image", media=None, uuid="u"),
        MediaItem(path=("multi_modal_data", "video", 0), modality="video", media="y"),
    )


def test_fields_that_are_absent_or_none_have_their_defaults() -> None:
    absent = read_prompt({"prompt": "a"})
    nothing: Any = {"cache_salt": None, "priority": None, "mm_processor_kwargs": None}
    assert read_prompt({"prompt": "a", **nothing}) == absent == read_prompt("a")
    assert absent == EnginePrompt(text="a")
    assert read_prompt(absent) is absent


def test_a_rendered_prompt_has_tokens_and_media() -> None:
    fields: Any = {"mm_hashes": {"image": ["h"]}, "mm_placeholders": {"image": [1]}}
    read = read_prompt({"prompt_token_ids": [1, 2], "is_external": True, **fields, "priority": 3})
    rendered = RenderedMedia(**fields, is_external=True)
    assert read == EnginePrompt(token_ids=[1, 2], rendered=rendered, priority=3)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"multi_modal_uuids": {"image": ["a", 5]}}, ("multi_modal_uuids", "image", 1)),
        ({"multi_modal_uuids": {"image": "x" * 129}}, ("multi_modal_uuids", "image", 0)),
        (
            {"multi_modal_data": {"image": ["x"]}, "multi_modal_uuids": {"image": ["a", "b"]}},
            ("multi_modal_uuids", "image"),
        ),
        ({"add_special_tokens": 1}, ("add_special_tokens",)),
        ({"priority": True}, ("priority",)),
        ({"media_io_kwargs": 5}, ("media_io_kwargs",)),
    ],
)
def test_a_wrong_field_has_its_path(fields: Any, path: tuple[Any, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        read_prompt({"prompt": "a", **fields})
    assert caught.value.path == path
