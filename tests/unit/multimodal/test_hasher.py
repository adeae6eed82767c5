"""Equal hashes mean equal content; whatever differs has another hash."""

from __future__ import annotations

import io
import json
import math
import re
from enum import IntEnum
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sensorium.multimodal.media import MediaBytes
from sensorium.multimodal.names import MediaHasher
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.multimodal import HASH_ALGORITHMS

PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
VECTORS = Path(__file__).with_name("digest_vectors.json")
HASHER = MediaHasher(model_revision="r", processor_fingerprint="p")


def name(options: object = None, media: object = b"", hasher: MediaHasher = HASHER) -> str:
    return hasher.name_item(
        hasher.digest_source(media),
        modality="image",
        decode_options=None,
        processor_kwargs={"options": options},
        cache_salt=None,
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"size": {"shortest_edge": 56}}, {"size.shortest_edge": 56}),
        ({"xa": "b"}, {"x": "ab"}),
        ({"a": 1, "b": 2}, {"a": {"b": 2}}),
        ({"a": "1"}, {"a": 1}),
        (0, 0.0),
        (1, True),
        (0, False),
        (None, ""),
        (None, "None"),
        ("", b""),
        ("a", b"a"),
        ([], {}),
        ([], None),
        ([1, 2], [[1], 2]),
        ([1, [2]], [1, 2]),
        ([[1], 2], [[1, 2]]),
        (["ab"], ["a", "b"]),
        ([1, 2], [2, 1]),
        ({1: "a"}, {"1": "a"}),
        ({True: "a"}, {1: "a"}),
        (12, "12"),
        (-0.0, 0.0),
        (1.0, math.nextafter(1.0, 2.0)),
        (2**64, 0),
    ],
)
def test_values_that_look_alike_have_different_hashes(one: object, other: object) -> None:
    assert name(one) != name(other)


def test_the_order_of_keys_never_changes_the_hash() -> None:
    one = {"a": 1, "b": {"c": 2, "d": [3]}, 4: 5}
    other = {4: 5, "b": {"d": [3], "c": 2}, "a": 1}
    assert name(one) == name(other)


def make_vectors() -> dict[str, str]:
    """Names of one of each kind, by algorithm: what other processes and later versions must give.

    `python -m tests.unit.multimodal.test_hasher` writes the file anew, when the format's version
    has changed.
    """
    media: dict[str, object] = {
        "bytes": b"\x89PNG",
        "array": PIXELS,
        "tensor": torch.tensor(PIXELS),
        "image": Image.fromarray(PIXELS),
        "frames": [PIXELS, PIXELS[::-1]],
        "video": (PIXELS[None], {"fps": 2.0, "frames_indices": [0]}),
        "sound": (np.linspace(-1, 1, 5, dtype=np.float32), 16_000),
    }
    options = {"size": {"shortest_edge": 56}, "x": [None, True, 1, -2.5, "é", 2**70]}
    vectors = {}
    for algorithm in HASH_ALGORITHMS:
        hasher = MediaHasher(algorithm, model_revision="r1", processor_fingerprint='{"a": 1}')
        for kind, item in media.items():
            vectors[f"{algorithm}/{kind}/source"] = hasher.digest_source(item)
            vectors[f"{algorithm}/{kind}/item"] = hasher.name_item(
                hasher.digest_source(item),
                modality="image",
                decode_options={"version": 1},
                processor_kwargs=options,
                cache_salt="salt",
            )
        vectors[f"{algorithm}/external"] = hasher.name_external("theirs", None)
    return vectors


def test_hashes_have_256_bits_and_are_the_same_in_every_process_and_version() -> None:
    vectors = make_vectors()
    assert vectors == json.loads(VECTORS.read_text())
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in vectors.values())
    assert len(set(vectors.values())) == len(vectors)


def test_everything_that_a_result_depends_on_is_part_of_its_name() -> None:
    plain: dict[str, Any] = {
        "modality": "image",
        "decode_options": {"background": [255, 255, 255]},
        "processor_kwargs": {"size": 4},
        "cache_salt": None,
    }
    changes: list[dict[str, Any]] = [
        {},
        {"modality": "video"},
        {"decode_options": {"background": [0, 0, 0]}},
        {"decode_options": None},
        {"processor_kwargs": {"size": 5}},
        {"processor_kwargs": {}},
        {"cache_salt": ""},
        {"cache_salt": "None"},
    ]
    names = [HASHER.name_item("d", **{**plain, **change}) for change in changes]
    names += [HASHER.name_item("e", **plain)]
    for others in (
        {"model_revision": "s", "processor_fingerprint": "p"},
        {"model_revision": "r", "processor_fingerprint": "q"},
        {"model_revision": "rp", "processor_fingerprint": ""},
    ):
        names.append(MediaHasher(**others).name_item("d", **plain))
    names += [MediaHasher(algorithm).name_item("d", **plain) for algorithm in HASH_ALGORITHMS]
    names += [HASHER.name_external("d", None), HASHER.name_external("d", "")]
    assert len(set(names)) == len(names)


def test_the_bytes_of_a_file_are_digested_once() -> None:
    media = MediaBytes(b"abc")
    digest = HASHER.digest_source(media)
    assert digest == HASHER.digest_source(b"abc") == HASHER.digest_source(bytearray(b"abc"))
    media.data = b"never looked at"
    assert HASHER.digest_source(media) == digest


def test_an_unknown_algorithm_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="unknown mm_hasher_algorithm 'md5'"):
        MediaHasher("md5")


def test_options_that_are_nested_without_end_are_refused() -> None:
    options: list[Any] = []
    options.append(options)
    with pytest.raises(RequestError, match="nested more than 32 levels deep"):
        name(options)


def test_subclasses_of_numbers_hash_as_numbers() -> None:
    class Size(IntEnum):
        SMALL = 3

    assert name(Size.SMALL) == name(3)
    assert name(np.float64(0.5)) == name(0.5)


def test_media_and_options_are_both_part_of_the_name() -> None:
    names = {name(o, m) for o in ("a", "b") for m in (b"a", b"b")}
    assert len(names) == 4


def test_the_memory_layout_does_not_change_the_hash() -> None:
    views = [
        PIXELS,
        np.asfortranarray(PIXELS),
        np.repeat(PIXELS, 2, axis=1)[:, ::2],
        PIXELS[::-1].copy()[::-1],
    ]
    assert len({name(media=view) for view in views}) == 1
    tensor = torch.tensor(PIXELS)
    strided = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert name(media=strided) == name(media=tensor)


@pytest.mark.parametrize("convert", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_shape_and_type_are_part_of_the_name(convert: Any) -> None:
    values = convert([[1, 2], [3, 4]])
    variants = [values, values.reshape(4), values.reshape(1, 4), values.reshape(4, 1)]
    variants += [values.T, convert([[1.0, 2.0], [3.0, 4.0]]), convert([[1, 2], [3, 5]])]
    names = [name(media=variant) for variant in variants]
    assert len(set(names)) == len(names)


def test_arrays_tensors_and_images_have_different_hashes() -> None:
    media = [PIXELS, torch.tensor(PIXELS), Image.fromarray(PIXELS), PIXELS.tobytes()]
    assert all(name(media=a) != name(media=b) for a, b in combinations(media, 2))


@pytest.mark.parametrize(
    "array",
    [
        np.array(3.5),
        np.array([1, 2], dtype=">i2"),
        np.array([0.5], dtype=np.float16),
        np.array([1 + 2j]),
        np.array([True, False]),
        np.empty((0, 3)),
        np.array([1.0], dtype=np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_any_number_have_a_name(array: np.ndarray[Any, Any]) -> None:
    assert name(media=array) == name(media=array.copy())
    if array.size:
        assert name(media=array) != name(media=array + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64])
def test_tensors_of_any_type_have_a_name(dtype: torch.dtype) -> None:
    for shape in ((), (2,), (0, 3)):
        tensor = torch.ones(shape, dtype=dtype)
        assert name(media=tensor) == name(media=tensor.clone())
        if tensor.numel():
            assert name(media=tensor) != name(media=torch.zeros(shape, dtype=dtype))


def make_palette_image(palette: list[int]) -> Image.Image:
    image = Image.new("P", (2, 2))
    image.putpalette(palette)
    image.putdata([0, 1, 1, 0])
    return image


def test_images_with_the_same_indices_and_another_palette_differ() -> None:
    black_white = make_palette_image([0, 0, 0, 255, 255, 255])
    red_blue = make_palette_image([255, 0, 0, 0, 0, 255])
    assert np.array_equal(np.asarray(black_white), np.asarray(red_blue))
    assert name(media=black_white) != name(media=red_blue)
    assert name(media=red_blue) == name(media=make_palette_image([255, 0, 0, 0, 0, 255]))


@pytest.mark.parametrize("file_format", ["PNG", "GIF"])
def test_a_palette_image_that_was_just_opened_has_the_name_of_one_that_was_loaded(
    file_format: str,
) -> None:
    file = io.BytesIO()
    make_palette_image([255, 0, 0, 0, 0, 255]).save(file, file_format)
    opened, loaded = Image.open(io.BytesIO(file.getvalue())), Image.open(file)
    loaded.load()
    assert opened.mode == "P"
    assert name(media=opened) == name(media=loaded)


def test_a_transparent_colour_is_part_of_a_palette_image() -> None:
    one, other = make_palette_image([0] * 6), make_palette_image([0] * 6)
    other.info["transparency"] = 1
    assert name(media=one) != name(media=other)


@pytest.mark.parametrize(("mode", "colour"), [("RGB", (255, 0, 0)), ("L", 7), ("1", 0)])
def test_a_transparent_colour_is_part_of_an_image_without_a_palette(
    mode: str, colour: int | tuple[int, ...]
) -> None:
    plain = Image.new(mode, (2, 2), colour)
    seen_through = plain.copy()
    seen_through.info["transparency"] = colour
    assert name(media=plain) != name(media=seen_through)


@pytest.mark.parametrize("dtype", ["datetime64[s]", ">f4", "complex64", "U3", "V3"])
def test_arrays_of_any_type_but_objects_have_names(dtype: str) -> None:
    array = np.zeros((2, 3), dtype=dtype)
    assert name(media=array) == name(media=np.asfortranarray(array))
    assert name(media=array) != name(media=array[:1])


def test_the_mode_of_an_image_is_part_of_its_name() -> None:
    grey = Image.fromarray(PIXELS[..., 0])
    names = {name(media=grey.convert(mode)) for mode in ("L", "RGB", "RGBA", "1", "P", "I", "F")}
    assert len(names) == 7


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, lambda: 0, np.array([object()]), range(3), np.int64(3)]
)
def test_values_without_a_canonical_form_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match="can't"):
        name(value)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3)
)


def freeze(value: object) -> object:
    """Return a form of the value that is equal only for values of equal types."""
    if isinstance(value, dict):
        return ("map", frozenset((k, freeze(v)) for k, v in value.items()))
    if isinstance(value, list):
        return ("list", *map(freeze, value))
    return (type(value).__name__, repr(value))


@given(values, values)
@settings(deadline=None)
def test_names_are_equal_if_and_only_if_the_values_are(one: object, other: object) -> None:
    assert (name(one) == name(other)) == (freeze(one) == freeze(other))


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(make_vectors(), indent=1) + "\n")


def test_a_conjugate_view_has_the_name_of_its_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert name(media=values.conj()) == name(media=values.conj().resolve_conj())
    assert name(media=values.conj()) != name(media=values)


def test_a_number_too_large_to_be_written_is_refused() -> None:
    with pytest.raises(RequestError, match="above 4096 bits"):
        name(10**5000)
