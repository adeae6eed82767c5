"""Options of a request lower what an item costs, and never raise it, whatever they are called."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sensorium.models.loading import load_config
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.processing import item_worker as item_worker_module
from sensorium.multimodal.processing.cost_guard import OwnOptions, get_cost, measure
from sensorium.multimodal.processing.item_worker import ItemJob, ItemWorker
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ProcessedItem
from tests.support.media import make_clip, make_melody, make_pixels, write_image, write_video

# Old names of options still work, with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:Passing `min_pixels`")
FAMILIES = (
    *("llava", "llava_next", "llava_onevision", "idefics3", "smolvlm", "internvl", "gemma3"),
    *("gemma4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "qwen2_5_omni"),
)
OMNI = "qwen2_5_omni"
PICTURES = {
    name: write_image(make_pixels(height, width), "PNG")
    for name, height, width in (
        ("small", 60, 70),
        ("large", 700, 900),
        ("square", 1120, 1120),
        ("wide", 60, 700),
    )
}
CLIP = write_video(make_clip(40, 64, 96))
# Ordinary options that make an item smaller or leave its size alone, by family.
LOWERING: list[tuple[str, dict[str, Any]]] = [
    *((family, {"do_normalize": False}) for family in FAMILIES),
    *((family, {"image_mean": [0.4, 0.4, 0.4]}) for family in FAMILIES),
    *(
        (family, {"size": {"shortest_edge": 1568, "longest_edge": 6272}})
        for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", OMNI)
    ),
    ("qwen2_5_vl", {"max_pixels": 28 * 28 * 20}),
    ("qwen2_5_vl", {"min_pixels": 28 * 28}),
    ("qwen2_5_vl", {"min_pixels": 28 * 28 * 40}),  # more of this item, not more than is allowed
    ("gemma3", {"do_pan_and_scan": False}),
    ("gemma4", {"max_soft_tokens": 70}),
    ("idefics3", {"do_image_splitting": False}),
    ("smolvlm", {"do_image_splitting": False}),
    ("internvl", {"max_patches": 2}),
    ("internvl", {"crop_to_patches": False}),
    ("llava_next", {"image_grid_pinpoints": [[56, 112]]}),
]
RAISING: list[tuple[str, str, dict[str, Any]]] = [
    (OMNI, "small", {"min_pixels": 5_500_000}),
    (OMNI, "small", {"min_pixels": 500_000}),
    (OMNI, "large", {"max_pixels": 28 * 28 * 16_384}),
    (OMNI, "small", {"size": {"shortest_edge": 10**6, "longest_edge": 10**6}}),
    (OMNI, "small", {"patch_size": 2}),
    (OMNI, "small", {"temporal_patch_size": 40}),
    (OMNI, "square", {"do_resize": False}),
    ("qwen3_vl", "small", {"size": {"shortest_edge": 10**6, "longest_edge": 10**6}}),
    ("glm4v", "small", {"size": {"shortest_edge": 10**6, "longest_edge": 10**6}}),
    ("llava", "small", {"size": {"shortest_edge": 400}, "do_center_crop": False}),
    ("llava", "small", {"crop_size": {"height": 560, "width": 560}}),
    ("gemma3", "small", {"size": {"height": 1120, "width": 1120}}),
    (
        "gemma3",
        "wide",
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16},
    ),
    ("gemma4", "small", {"max_soft_tokens": 1120}),
    ("idefics3", "small", {"size": {"longest_edge": 1120}}),
    ("internvl", "large", {"crop_to_patches": True, "max_patches": 40}),
    ("llava_next", "small", {"image_grid_pinpoints": [[1120, 1120]]}),
]


@pytest.fixture(scope="module")
def processor_of(tiny_model: Callable[[str], str]) -> Callable[[str], MultiModalProcessor]:
    @cache
    def make(family: str) -> MultiModalProcessor:
        directory = tiny_model(family)
        return MultiModalProcessor(directory, load_config(directory, trust_remote_code=False))

    return make


def process(
    worker: ItemWorker,
    modality: str,
    data: object,
    options: dict[str, Any],
    media_io_kwargs: dict[str, dict[str, Any]] | None = None,
) -> ProcessedItem:
    asked = OwnOptions(processor_kwargs=options, media_io_kwargs=media_io_kwargs or {})
    processor_kwargs, decode_options = asked.resolve(modality, is_encoded=isinstance(data, bytes))
    job = ItemJob(
        mm_hash="",
        modality=modality,
        decode_options=decode_options,
        processor_kwargs=processor_kwargs,
    )
    item, _ = worker.process(job, data)
    return item


@pytest.mark.parametrize("family", FAMILIES)
def test_cost_that_is_measured_without_pixels_is_that_of_the_item(
    processor_of: Callable[[str], MultiModalProcessor], family: str
) -> None:
    processor = processor_of(family)
    for height, width in ((60, 70), (300, 120), (90, 800), (336, 336)):
        image = processor.process_item("image", Image.new("RGB", (width, height)), {})
        assert measure(processor, "image", (height, width), {}) == get_cost(image)
    if "video" in processor.modalities:
        frames = np.zeros((6, 120, 200, 3), dtype=np.uint8)
        video = processor.process_item("video", frames, {})
        assert measure(processor, "video", frames.shape[:3], {}) == get_cost(video)


@pytest.mark.parametrize(("family", "options"), LOWERING, ids=str)
def test_options_that_lower_or_keep_the_size_of_an_item_are_taken(
    processor_of: Callable[[str], MultiModalProcessor], family: str, options: dict[str, Any]
) -> None:
    guarded = ItemWorker(processor_of(family), MediaLimits(), OwnOptions())
    for name in ("small", "large"):
        assert process(guarded, "image", PICTURES[name], options).layout is not None


@pytest.mark.parametrize(("family", "picture", "options"), RAISING, ids=str)
def test_options_that_raise_it_are_refused_before_decoding(
    processor_of: Callable[[str], MultiModalProcessor],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    picture: str,
    options: dict[str, Any],
) -> None:
    processor = processor_of(family)
    guarded = ItemWorker(processor, MediaLimits(), OwnOptions())
    with monkeypatch.context() as patched:
        patched.setattr(item_worker_module, "decode", _refuse_to_decode)
        with pytest.raises(RequestError, match="this server makes at most") as caught:
            process(guarded, "image", PICTURES[picture], options)
    assert f"option(s) {', '.join(sorted(options))} this image" in str(caught.value)
    assert "--allow-larger-media" in str(caught.value)


def _refuse_to_decode(*_: object, **__: object) -> None:
    raise AssertionError("it was decoded")


def test_options_of_the_server_itself_set_the_measure(
    processor_of: Callable[[str], MultiModalProcessor],
) -> None:
    processor = processor_of(OMNI)
    raised = {"size": {"shortest_edge": 100_000, "longest_edge": 200_000}}
    generous = ItemWorker(processor, MediaLimits(), OwnOptions(processor_kwargs=raised))
    assert process(generous, "image", PICTURES["small"], raised).layout is not None
    lowered = {"size": {"shortest_edge": 784, "longest_edge": 3136}}
    strict = ItemWorker(processor, MediaLimits(), OwnOptions(processor_kwargs=lowered))
    with pytest.raises(RequestError, match=r"option\(s\) size this image"):
        process(
            strict,
            "image",
            PICTURES["large"],
            {"size": {"shortest_edge": 784, "longest_edge": 15_680}},
        )
    lifted = ItemWorker(processor, MediaLimits())
    assert process(lifted, "image", PICTURES["small"], raised).layout is not None


@pytest.mark.parametrize(
    ("options", "media_io_kwargs"),
    [
        ({"min_pixels": 10**6, "max_pixels": 10**6}, {}),
        ({"size": {"shortest_edge": 10**6, "longest_edge": 10**6}}, {}),
        ({"num_frames": 40}, {}),
        ({"fps": 10.0}, {}),
        ({}, {"video": {"num_frames": 40}}),
        ({}, {"video": {"fps": 10.0}}),
    ],
    ids=str,
)
def test_larger_and_longer_videos_are_refused_before_decoding(
    processor_of: Callable[[str], MultiModalProcessor],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    media_io_kwargs: dict[str, dict[str, Any]],
) -> None:
    own = OwnOptions(media_io_kwargs={"video": {"num_frames": 8}})
    guarded = ItemWorker(processor_of(OMNI), MediaLimits(max_pixels=64 * 96), own)
    monkeypatch.setattr("sensorium.multimodal.decoding.video._read_frames", _refuse_to_decode)
    with pytest.raises(RequestError, match="this video would become"):
        process(guarded, "video", CLIP, options, media_io_kwargs)


@pytest.mark.parametrize(
    ("options", "media_io_kwargs"),
    [
        ({"num_frames": 4}, {}),
        ({"do_normalize": False}, {"video": {"num_frames": 8}}),
        ({"size": {"shortest_edge": 784, "longest_edge": 1568}}, {"video": {"num_frames": 8}}),
        ({}, {"video": {"num_frames": 2}}),
    ],
    ids=str,
)
def test_smaller_and_shorter_videos_are_taken(
    processor_of: Callable[[str], MultiModalProcessor],
    options: dict[str, Any],
    media_io_kwargs: dict[str, dict[str, Any]],
) -> None:
    own = OwnOptions(media_io_kwargs={"video": {"num_frames": 8}})
    guarded = ItemWorker(processor_of(OMNI), MediaLimits(), own)
    item = process(guarded, "video", CLIP, options, media_io_kwargs)
    assert item.layout is not None


def test_decoded_media_is_also_measured(
    processor_of: Callable[[str], MultiModalProcessor],
) -> None:
    guarded = ItemWorker(processor_of(OMNI), MediaLimits(), OwnOptions())
    pixels = make_pixels(60, 70)
    for media in (pixels, pixels.transpose(2, 0, 1), Image.fromarray(pixels)):
        with pytest.raises(RequestError, match="min_pixels"):
            process(guarded, "image", media, {"min_pixels": 500_000})
    with pytest.raises(RequestError, match="patch_size"):
        process(guarded, "video", np.stack([pixels] * 2), {"temporal_patch_size": 256})


def test_a_longer_window_for_audio_is_refused(
    processor_of: Callable[[str], MultiModalProcessor],
) -> None:
    guarded = ItemWorker(processor_of("gemma4"), MediaLimits(), OwnOptions())
    audio = make_melody(16_000)
    assert process(guarded, "audio", audio, {"pad_to_multiple_of": 64}).layout is not None
    with pytest.raises(RequestError, match=r"option\(s\) pad_to_multiple_of this audio"):
        process(guarded, "audio", audio, {"pad_to_multiple_of": 2**20})
