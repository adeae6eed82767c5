"""Layouts from headers: what the size of an image says is what its pixels would have said."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from transformers import AutoConfig

from sensorium.multimodal.decoding.decoding import resolve_decode_options
from sensorium.multimodal.decoding.images import decode_image, read_image_size
from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.multimodal.names import MediaHasher
from sensorium.multimodal.processing.item_backend import InProcessBackend
from sensorium.multimodal.processing.item_worker import ItemJob, ItemWorker
from sensorium.multimodal.processing.layouts import SIZED_PROCESSORS, SizeLayouts, has_sized_images
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import RequestError

_FAMILIES = (
    *(
        "aya_vision",
        "cohere2_vision",
        "gemma3",
        "gemma4",
        "glm4v",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
    ),
    *("llava_onevision", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"),
)
_OPTIONS: dict[str, dict[str, object]] = {
    "gemma3": {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16},
    "qwen2_5_vl": {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 40}},
    "internvl": {"max_patches": 4},
    "idefics3": {"do_image_splitting": False},
}
_NUM_SIZES = 12
_LIMITS = MediaLimits()


class _CountingBackend(InProcessBackend):
    num_started = 0

    def start(self, job: ItemJob, media: object):  # type: ignore[no-untyped-def]
        self.num_started += 1
        return super().start(job, media)


def _make_job(options: dict[str, object]) -> ItemJob:
    return ItemJob(
        mm_hash="",
        modality="image",
        decode_options=resolve_decode_options("image", {}),
        processor_kwargs=options,
    )


def _write(
    size: tuple[int, int], *, seed: int = 0, orientation: int = 1, kind: str = "PNG"
) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, exif=exif)
    return buffer.getvalue()


def _draw_sizes(seed: str) -> list[tuple[int, int]]:
    """Small and large, flat and tall ones."""
    draw = random.Random(seed)
    sizes = [(draw.randint(28, 400), draw.randint(28, 400)) for _ in range(_NUM_SIZES)]
    return [*sizes, (28, 28), (30, 600), (900, 41), (336, 336), (337, 335)]


@pytest.mark.parametrize("family", _FAMILIES)
def test_layouts_from_sizes_equal_those_from_pixels(
    family: str, tiny_model: Callable[[str], str]
) -> None:
    path = tiny_model(family)
    processor = MultiModalProcessor(path, AutoConfig.from_pretrained(path))
    assert has_sized_images(processor)
    worker = ItemWorker(processor, _LIMITS)
    layouts = SizeLayouts(hasher=MediaHasher(), backend=InProcessBackend(worker), limits=_LIMITS)
    kinds = set()
    for options in ({}, _OPTIONS.get(family)):
        if options is None:
            continue
        job = _make_job(options)
        for index, size in enumerate(_draw_sizes(family)):
            data = _write(size, seed=index, orientation=1 + index % 8)
            expected, _ = worker.process(job, data)
            assert layouts.get(job, MediaBytes(data)) == expected.layout, (size, options)
            kinds.add(expected.layout)
    assert len(kinds) > 1 or family in ("gemma3", "llava")  # the others' layouts follow the size


def test_every_family_with_images_has_layouts_from_sizes(tiny_model: Callable[[str], str]) -> None:
    from make_tiny_models import FAMILIES

    for family in FAMILIES:
        path = tiny_model(family)
        processor = MultiModalProcessor(path, AutoConfig.from_pretrained(path))
        assert has_sized_images(processor) == ("image" in processor.modalities), family
    assert len(SIZED_PROCESSORS) == len(_FAMILIES)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_header_has_the_size_of_the_upright_image(kind: str, orientation: int) -> None:
    data = _write((30, 50), orientation=orientation, kind=kind)
    size = read_image_size(data, limits=_LIMITS)
    assert size == decode_image(data, limits=_LIMITS).size
    assert size == ((50, 30) if orientation > 4 else (30, 50))


def test_header_is_read_without_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("PNG", "JPEG", "WEBP"):
        data = _write((30, 50), orientation=6, kind=kind)
        with monkeypatch.context() as patched:
            patched.setattr(Image.Image, "load", _refuse_to_load)
            patched.setattr("PIL.ImageFile.ImageFile.load", _refuse_to_load)
            assert read_image_size(data, limits=_LIMITS) == (50, 30)


def _refuse_to_load(image: Image.Image) -> None:
    raise AssertionError(f"a {image.format} was decoded")


def test_orientation_behind_the_pixels_needs_a_decode() -> None:
    data = _write((30, 50), orientation=6)
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    tail = data.index(b"IEND") - 4
    moved = data[:start] + data[end:tail] + data[start:end] + data[tail:]
    assert decode_image(moved, limits=_LIMITS).size == (50, 30)
    assert read_image_size(moved, limits=_LIMITS) is None
    noted = PngInfo()
    noted.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    buffer = io.BytesIO()
    Image.new("RGB", (30, 50)).save(buffer, "PNG", pnginfo=noted)
    assert read_image_size(buffer.getvalue(), limits=_LIMITS) == (50, 30)


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "BMP"])
def test_other_formats_need_a_decode(kind: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (30, 50)).save(buffer, kind)
    assert read_image_size(buffer.getvalue(), limits=_LIMITS) is None


def test_a_file_that_is_no_image_is_refused_by_its_header() -> None:
    for data in (b"", os.urandom(100), b"\x89PNG\r\n\x1a\n", _write((30, 50))[:20]):
        with pytest.raises(RequestError):
            read_image_size(data, limits=_LIMITS)
    with pytest.raises(RequestError, match="more than 100 pixels"):
        read_image_size(_write((30, 50)), limits=MediaLimits(max_pixels=100))
    with pytest.raises(RequestError, match="more than 10 bytes"):
        read_image_size(_write((30, 50)), limits=MediaLimits(max_bytes=10))


def test_a_size_is_processed_once_and_few_are_kept(
    tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("qwen2_5_vl")
    processor = MultiModalProcessor(path, AutoConfig.from_pretrained(path))
    backend = _CountingBackend(ItemWorker(processor, _LIMITS))
    layouts = SizeLayouts(hasher=MediaHasher(), backend=backend, limits=_LIMITS)
    job = _make_job({})
    first = [layouts.get(job, MediaBytes(_write((56, 84), seed=seed))) for seed in range(3)]
    assert len({id(layout) for layout in first}) == backend.num_started == 1
    small = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 4}}
    layouts.get(_make_job(small), MediaBytes(_write((56, 84))))
    assert backend.num_started == 2
    monkeypatch.setattr(layouts._layouts, "_capacity", len(first[0].text) + 1)  # type: ignore[union-attr]
    layouts.get(job, MediaBytes(_write((84, 56))))
    layouts.get(job, MediaBytes(_write((84, 56))))
    assert backend.num_started == 3
    layouts.get(job, MediaBytes(_write((56, 84))))
    assert backend.num_started == 4


def test_only_files_of_images_are_laid_out_by_size(tiny_model: Callable[[str], str]) -> None:
    path = tiny_model("qwen2_5_vl")
    processor = MultiModalProcessor(path, AutoConfig.from_pretrained(path))
    backend = _CountingBackend(ItemWorker(processor, _LIMITS))
    layouts = SizeLayouts(hasher=MediaHasher(), backend=backend, limits=_LIMITS)
    assert layouts.get(_make_job({}), Image.new("RGB", (56, 84))) is None
    video = ItemJob(mm_hash="", modality="video", decode_options={}, processor_kwargs={})
    assert layouts.get(video, MediaBytes(_write((56, 84)))) is None
    assert backend.num_started == 0
