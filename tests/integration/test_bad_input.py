"""A bad request is refused with a message that names what is wrong, and fails alone."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sensorium import LLM, ModelError, RequestError, SamplingParams
from tests.integration.neighbours import MARKERS, PARAMS, Neighbours, make_prompt
from tests.parity.cases import make_image, make_video

NeighboursOf = Callable[[str], Neighbours]
GOOD_IMAGE = make_image(60, 60, seed=60)


def make_truncated_image() -> Image.Image:
    buffer = io.BytesIO()
    GOOD_IMAGE.save(buffer, "PNG")
    return Image.open(io.BytesIO(buffer.getvalue()[:3000]))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([GOOD_IMAGE] * 3, "3 image items, but limit_mm_per_prompt allows 2"),
        ([np.zeros((1, 1, 60, 60, 3))], r"image\[0\]: .*shape \(1, 1, 60, 60, 3\)"),
        ([GOOD_IMAGE, np.zeros((0, 60, 3))], r"image\[1\]: .*shape \(0, 60, 3\)"),
        ([torch.zeros(3, 60, 0)], r"image\[0\]: .*shape \(3, 60, 0\)"),
        ([np.zeros((60, 60, 7))], r"image\[0\]: .*channel"),
        ([np.full((60, 60, 3), "red")], r"image\[0\]: .*str"),
        ([np.zeros((60, 60, 3), dtype=object)], r"image\[0\]: .*objects"),
        ([Image.new("RGB", (0, 0))], r"image\[0\]: this image is empty"),
        ([np.zeros((60, 60, 3), dtype="datetime64[s]")], r"image\[0\]: .*datetime64"),
        ([torch.zeros(3, 60, 60).to_sparse()], r"image\[0\]: .*plain tensor"),
        ([torch.zeros(3, 60, 60, device="meta")], r"image\[0\]: .*plain tensor"),
        ([np.broadcast_to(np.uint8(0), (50_000, 50_000, 3))], r"image\[0\]: .*pixels"),
        (["http://127.0.0.1/"], r"image\[0\]: media from 127.0.0.1: .* a non-public address"),
        (["file:///etc/hostname"], r"image\[0\]: this server reads no local files"),
        ([b""], r"image\[0\]: the media is empty"),
        (["picture.png"], r"image\[0\]: media URLs start with data:"),
        ([None], r"image\[0\]: has neither media nor a uuid"),
        ([np.full((60, 60, 3), np.nan)], "image.*not finite"),
        ([torch.full((3, 60, 60), torch.inf)], "image.*not finite"),
    ],
)
@pytest.mark.parametrize("family", ["llava", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_images_that_cannot_be_read_are_refused(
    neighbours_of: NeighboursOf, family: str, images: list[Any], message: str
) -> None:
    assert re.search(message, neighbours_of(family).fail(make_prompt(family, *images)))


def test_a_damaged_file_is_refused(neighbours_of: NeighboursOf) -> None:
    message = neighbours_of("llava").fail(make_prompt("llava", GOOD_IMAGE, make_truncated_image()))
    assert re.search(r"image\[1\]: .*truncated", message)


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_5_vl"])
def test_a_prompt_longer_than_the_context_is_refused(
    neighbours_of: NeighboursOf, family: str
) -> None:
    message = neighbours_of(family).fail("fox " * 400)
    assert re.search(r"the prompt has \d+ tokens, but the context holds 256", message)


def test_an_item_larger_than_the_encoder_cache_is_refused(neighbours_of: NeighboursOf) -> None:
    large = make_image(220, 220, seed=61)
    message = neighbours_of("qwen2_5_vl").fail(make_prompt("qwen2_5_vl", GOOD_IMAGE, large))
    assert re.search(r"image item 1 needs 64 embeddings, .*encoder cache holds 48", message)


@pytest.mark.parametrize("family", MARKERS)
def test_markers_and_items_must_match(neighbours_of: NeighboursOf, family: str) -> None:
    neighbours = neighbours_of(family)
    one = make_prompt(family, GOOD_IMAGE)
    none = {"prompt": one["prompt"]}
    message = neighbours.fail({**one, "prompt": one["prompt"] + MARKERS[family]})
    assert re.search(r"2 '.*' marker\(s\), but 1 image item", message)
    assert re.search(r"1 '.*' marker\(s\), but 0 image item", neighbours.fail(none))
    assert re.search(r"0 '.*' marker\(s\), but 1 ", neighbours.fail({**one, "prompt": "no marker"}))


def test_a_placeholder_that_belongs_to_no_item_is_refused(neighbours_of: NeighboursOf) -> None:
    gemma3 = neighbours_of("gemma3")
    good = make_prompt("gemma3", GOOD_IMAGE)
    for text in ("<image_soft_token>" + good["prompt"], good["prompt"] + "<image_soft_token>"):
        assert "placeholder" in gemma3.fail({**good, "prompt": text})
    assert "placeholder" in gemma3.fail("a stray <image_soft_token>")
    token_id = gemma3.llm.get_tokenizer().image_token_id
    assert "placeholder" in gemma3.fail([20, token_id, 21])


@pytest.mark.parametrize(
    ("family", "media", "message"),
    [
        ("llama", {"image": GOOD_IMAGE}, r"takes no image \(it takes: text only\)"),
        ("llava", {"audio": np.zeros(100)}, r"takes no audio \(it takes: image\)"),
        ("llava", {"video": make_video(4, 60, 60, seed=1)}, "takes no video"),
        ("qwen2_5_vl", {"audio": np.zeros(100)}, r"takes no audio \(it takes: image, video\)"),
        ("gemma3", {"smell": "rose"}, "takes no smell"),
    ],
)
def test_a_modality_that_the_model_does_not_have_is_refused(
    neighbours_of: NeighboursOf, family: str, media: dict[str, Any], message: str
) -> None:
    prompt = {"prompt": "hello", "multi_modal_data": media}
    assert re.search(message, neighbours_of(family).fail(prompt))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "hi", "image": 1, "promt": 2}, r"unknown prompt field\(s\): image, promt"),
        ({"prompt": "hi", "prompt_token_ids": [1]}, "either 'prompt' or 'prompt_token_ids'"),
        ({"multi_modal_data": {}}, "either 'prompt' or 'prompt_token_ids'"),
        ({"prompt": 5}, "prompt: must be str, not int"),
        ({"prompt": "hi", "multi_modal_data": [1]}, "multi_modal_data: must be Mapping"),
        ({"prompt": "hi", "cache_salt": 7}, "cache_salt: must be str"),
        ({"prompt": "hi", "priority": "high"}, "priority: must be int"),
        ("", "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([5, 100_000, 6], "token id 100000 is outside the model's vocabulary"),
        ([5, 2**70], "outside the model's vocabulary"),
        ([5, -1], "token ids must be integers >= 0, not -1"),
        ([5, "6"], "token ids must be integers >= 0, not '6'"),
        ([5, 6.0], "token ids must be integers >= 0, not 6.0"),
        (17, "not int"),
        ({"prompt_token_ids": None}, "not NoneType"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(
    neighbours_of: NeighboursOf, prompt: Any, message: str
) -> None:
    assert re.search(message, neighbours_of("llama").fail(prompt))


def test_text_that_has_no_utf8_form_is_refused(neighbours_of: NeighboursOf) -> None:
    assert neighbours_of("llama").fail("half a surrogate pair: \ud83d")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, r"temperature: must be a number in \[0, 100\], not -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1.5}, "seed: must be an integer, not 1.5"),
        ({"max_tokens": 0}, "max_tokens: must be an integer >= 1, not 0"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens: must be at most max_tokens=2"),
        ({"stop": ["", "a"]}, "stop: must be non-empty text or a list of non-empty texts"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_sampling_parameters_that_make_no_sense_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("top_p", "most"),
        ("max_tokens", "ten"),
        ("min_tokens", "one"),
        ("stop", 5),
        ("stop_token_ids", 5),
    ],
)
def test_sampling_parameters_of_a_wrong_type_are_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=(100_000,)),
        SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=(2**70,)),
    ],
)
def test_a_stop_token_outside_the_vocabulary_does_not_affect_other_requests(
    neighbours_of: NeighboursOf, params: SamplingParams
) -> None:
    llm = neighbours_of("llama").llm
    alone = llm.generate("hello world", PARAMS, use_tqdm=False)
    outputs = llm.generate(
        ["the lazy dog", "hello world"], [params, PARAMS], use_tqdm=False, return_errors=True
    )
    assert outputs[1].error is None
    assert outputs[1].outputs[0].token_ids == alone[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "processor_kwargs",
    [
        {"size": "large"},
        {"crop_size": {"height": 28, "width": 28}},
        {"text": "another"},
        {"options": object()},
    ],
)
def test_processor_options_that_do_not_work_are_refused(
    neighbours_of: NeighboursOf, processor_kwargs: dict[str, Any]
) -> None:
    prompt = make_prompt("llava", GOOD_IMAGE)
    assert "image" in neighbours_of("llava").fail(
        {**prompt, "mm_processor_kwargs": processor_kwargs}
    )


def test_without_return_errors_the_first_error_is_raised_with_all_outputs(
    neighbours_of: NeighboursOf,
) -> None:
    llm = neighbours_of("llama").llm
    with pytest.raises(RequestError, match=r"^prompts\[1\].prompt: .*100000") as caught:
        llm.generate(["hello", [100_000], "world", ""], PARAMS, use_tqdm=False)
    outputs: Any = caught.value.outputs
    assert [output.error is None for output in outputs] == [True, False, True, False]
    assert len(outputs[2].outputs[0].token_ids) == 6
    with pytest.raises(RequestError, match=r"^prompt: token id 100000"):
        llm.generate([[100_000]], PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    "params", [[None], [{"temperature": 0}], {"temperature": 0}, "x", 5, iter([SamplingParams()])]
)
def test_objects_that_are_no_sampling_parameters_are_refused(
    neighbours_of: NeighboursOf, params: Any
) -> None:
    with pytest.raises(RequestError, match="sampling params"):
        neighbours_of("llama").llm.generate(["hello"], params, use_tqdm=False)


def test_an_internal_error_in_one_prompt_does_not_affect_the_others(
    neighbours_of: NeighboursOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = neighbours_of("llama").llm
    expand = type(llm.input_processor).process_pausing

    def process(self: Any, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        if prompt == "trip":
            raise ZeroDivisionError("a bug")
        return expand(self, request_id, prompt, params, **options)

    monkeypatch.setattr(type(llm.input_processor), "process_pausing", process)
    outputs = llm.generate(["hello", "trip"], use_tqdm=False, return_errors=True)
    assert outputs[0].error is None
    assert "internal error: ZeroDivisionError: a bug" in str(outputs[1].error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_mm_per_prompt": [("image", 4)]}, "limit_mm_per_prompt"),
        ({"seed": "x"}, "seed"),
        ({"device": None}, "device"),
        ({"dtype": []}, "dtype"),
        ({"kv_cache_memory_bytes": 10**15}, "does not fit on cpu: .*kv_cache_memory_bytes"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tiny_model: Callable[[str], str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(tiny_model("llama"), **options)
