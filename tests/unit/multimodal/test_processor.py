"""The model's own processor, one item a call: tensors and a layout, or a reason."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.multimodal import ItemLayout

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def load(tiny_model: Callable[[str], str]) -> Callable[[str], MultiModalProcessor]:
    loaded: dict[str, MultiModalProcessor] = {}

    def load_family(family: str) -> MultiModalProcessor:
        if family not in loaded:
            directory = tiny_model(family)
            loaded[family] = MultiModalProcessor(directory, AutoConfig.from_pretrained(directory))
        return loaded[family]

    return load_family


@pytest.fixture(scope="module")
def qwen(load: Callable[[str], MultiModalProcessor]) -> MultiModalProcessor:
    return load("qwen2_5_vl")


def test_modalities_are_those_that_the_processor_has(
    load: Callable[[str], MultiModalProcessor],
) -> None:
    assert load("llama").modalities == ()
    assert load("llava").modalities == ("image",)
    assert load("qwen2_5_vl").modalities == ("image", "video")


def test_an_image_becomes_tensors_of_its_own_and_a_layout(qwen: MultiModalProcessor) -> None:
    item = qwen.process_item("image", Image.fromarray(PIXELS), {})
    assert item.kwargs.keys() == {"pixel_values", "image_grid_thw"}
    num_embeds = int(item.kwargs["image_grid_thw"].prod()) // 4
    assert item.layout == ItemLayout(
        text="<|image_pad|>" * num_embeds,
        token_id=qwen.get_token_ids("image")[0],
        num_embeds=num_embeds,
    )
    assert item.modality == "image"


def test_frames_that_were_given_are_the_frames_that_are_used(qwen: MultiModalProcessor) -> None:
    frames = np.stack([PIXELS] * 6)
    item = qwen.process_item("video", frames, {})
    assert item.kwargs["video_grid_thw"][0, 0] == 3  # two frames make a patch
    images = qwen.process_item("video", [Image.fromarray(PIXELS)] * 6, {})
    assert torch.equal(images.kwargs["pixel_values_videos"], item.kwargs["pixel_values_videos"])


class Spy:
    """A processor that notes how it was called."""

    video_token = "V"
    tokenizer = None

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> dict[str, Any]:
        self.calls.append(arguments)
        text = "<|video_pad|><|video_pad|>"
        return {"text_replacement_offsets": [[{"replacement": text}]]}


def test_frames_are_sampled_only_if_that_was_asked_for(
    qwen: MultiModalProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy()
    monkeypatch.setattr(qwen, "hf_processor", spy)
    frames = np.stack([PIXELS] * 2)
    qwen.process_item("video", frames, {})
    qwen.process_item("video", frames, {"do_sample_frames": True})
    assert [call["do_sample_frames"] for call in spy.calls] == [False, True]
    assert [len(call["videos"]) for call in spy.calls] == [1, 1]


def test_processors_that_do_different_things_have_different_fingerprints(
    load: Callable[[str], MultiModalProcessor], qwen: MultiModalProcessor
) -> None:
    fingerprints = {qwen.fingerprint, load("llava").fingerprint, load("llama").fingerprint}
    assert len(fingerprints) == 3
    assert load("llama").fingerprint == ""


@pytest.mark.parametrize("mode", ["P", "L", "RGBA", "1", "CMYK"])
def test_an_image_of_any_mode_is_what_its_colours_are(qwen: MultiModalProcessor, mode: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    as_colours = image.convert("RGB")
    item, expected = (qwen.process_item("image", i, {}) for i in (image, as_colours))
    assert torch.equal(item.kwargs["pixel_values"], expected.kwargs["pixel_values"])


@pytest.mark.parametrize(
    ("modality", "media", "message"),
    [
        ("image", "cat.png", "expected a PIL image, a numpy array or a torch tensor, not str"),
        ("image", b"\x89PNG", "not bytes"),
        ("image", np.zeros(5), r"2 or 3 non-empty dimensions, not shape \(5,\)"),
        ("image", np.zeros((0, 5, 3)), r"not shape \(0, 5, 3\)"),
        ("video", np.zeros((5, 5, 3)), r"4 non-empty dimensions, not shape \(5, 5, 3\)"),
        ("video", [], "expected an array or a list of frames that is not empty, not list"),
        ("video", ["frame.png"], "not str"),
        ("video", [PIXELS, PIXELS[1:]], r"frames of different sizes: .*39, 60, 3.*40, 60, 3"),
    ],
)
def test_media_that_can_not_be_processed_is_refused_with_a_reason(
    qwen: MultiModalProcessor, modality: str, media: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        qwen.process_item(modality, media, {})


@pytest.mark.parametrize("mode", ["RGB", "P"])
def test_a_damaged_image_is_the_callers_fault(qwen: MultiModalProcessor, mode: str) -> None:
    file = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(file, "PNG")
    damaged = Image.open(io.BytesIO(file.getvalue()[:-100]))
    with pytest.raises(RequestError, match=r"the media could not be processed: .*truncated"):
        qwen.process_item("image", damaged, {})


def test_a_fault_of_our_own_code_is_no_request_error(
    qwen: MultiModalProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("call() got an unexpected keyword argument")

    monkeypatch.setattr(qwen, "_call", fail)
    with pytest.raises(TypeError, match="unexpected keyword"):
        qwen.process_item("image", Image.fromarray(PIXELS), {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "large"}, "the media could not be processed"),
        ({"text": "no"}, "the media could not be processed"),
    ],
)
def test_options_that_the_processor_can_not_take_are_refused(
    qwen: MultiModalProcessor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        qwen.process_item("image", PIXELS, options)


def test_a_directory_without_a_processor_is_refused_by_name(
    tiny_model: Callable[[str], str], tmp_path: Any
) -> None:
    config = AutoConfig.from_pretrained(tiny_model("llava"))
    with pytest.raises(ModelError, match=f"'{tmp_path}' has no tokenizer"):
        MultiModalProcessor(str(tmp_path), config)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=f"'{tmp_path}' has no processor for its media"):
        MultiModalProcessor(str(tmp_path), config)
    (tmp_path / "processor_config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"no processor can be loaded from '{tmp_path}'"):
        MultiModalProcessor(str(tmp_path), config)


def test_a_modality_that_the_model_lacks_has_no_token(qwen: MultiModalProcessor) -> None:
    assert qwen.get_token_ids("audio") == ()
    assert len(qwen.get_token_ids("image")) == 1
    assert qwen.get_token_ids("video")[1:] == qwen.get_token_ids("image")


@pytest.mark.parametrize(
    "media", [PIXELS / 255, (PIXELS / 255).astype(np.float32), torch.rand(3, 40, 60), PIXELS > 128]
)
def test_pixels_that_would_become_black_are_refused(
    qwen: MultiModalProcessor, media: object
) -> None:
    with pytest.raises(RequestError, match="pixel values must go from 0 to 255"):
        qwen.process_item("image", media, {})


def test_scaled_pixels_are_accepted_with_do_rescale_false(qwen: MultiModalProcessor) -> None:
    scaled = qwen.process_item("image", PIXELS.astype(np.float64) / 255, {"do_rescale": False})
    plain = qwen.process_item("image", PIXELS, {})
    difference = scaled.kwargs["pixel_values"].float() - plain.kwargs["pixel_values"]
    assert difference.abs().mean() < 0.02  # bytes are rounded and clamped where they are resized


def test_gray_flipped_and_byte_swapped_arrays_are_processed_alike(
    qwen: MultiModalProcessor,
) -> None:
    gray = PIXELS[..., 0]
    as_color = qwen.process_item("image", np.stack([gray] * 3, axis=-1), {})
    assert torch.equal(
        qwen.process_item("image", gray, {}).kwargs["pixel_values"],
        as_color.kwargs["pixel_values"],
    )
    flipped = PIXELS[::-1]
    foreign = PIXELS.astype(">f4")
    for one, other in ((flipped, flipped.copy()), (foreign, PIXELS.astype("<f4"))):
        pixels = [qwen.process_item("image", i, {}).kwargs["pixel_values"] for i in (one, other)]
        assert torch.equal(*pixels)
