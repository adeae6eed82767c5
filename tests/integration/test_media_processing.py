"""Everything is perceived once: what a cache has is neither decoded nor processed again.

That holds for every caller, in every form of the media, and as often as it comes.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sensorium import MediaFetchError, RequestError
from sensorium.models.loading import load_config
from sensorium.multimodal.processing.cost_guard import check_processor_kwargs
from sensorium.multimodal.processing.processor import MultiModalProcessor
from tests.integration.media_steps import (
    CACHE_TYPES,
    Calls,
    LlmOf,
    QueryCount,
    assert_idle,
    forget_outputs,
    generate,
    get_statistics,
    make_new_image,
    make_new_png,
    make_prompt,
    process,
    process_and_release,
    release,
)
from tests.support.engine import make_llm

TinyModel = Callable[[str], str]
ONCE = {"decode": 1, "process": 1, "call": 1}


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_hit_decodes_nothing_and_calls_no_processor(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm, prompt = llm_of(cache_type), make_prompt(make_new_png())
    calls, queries = Calls(monkeypatch, llm), QueryCount(llm)
    cold = llm.generate(prompt, use_tqdm=False)[0]
    assert calls.take() == ONCE
    assert queries.get() == (1, 0)
    warm = llm.generate(prompt, use_tqdm=False)[0]
    assert calls.take() == {}
    assert queries.get() == (2, 1)
    (first,), (second,) = cold.mm_items, warm.mm_items
    assert first.mm_hash == second.mm_hash
    assert (first.is_processor_hit, second.is_processor_hit) == (False, True)
    transfers = {"lru": ("tensors", "none"), "shm": ("shared", "shared")}
    assert (first.transfer, second.transfer) == transfers[cache_type]


def test_without_a_cache_every_request_processes(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, prompt = llm_of("off"), make_prompt(make_new_png())
    calls = Calls(monkeypatch, llm)
    outputs = [llm.generate(prompt, use_tqdm=False)[0] for _ in range(2)]
    assert calls.take() == {"decode": 2, "process": 2, "call": 2}
    assert [item.is_processor_hit for output in outputs for item in output.mm_items] == [False] * 2
    assert get_statistics(llm).num_queries == 0


@pytest.mark.parametrize("cache_type", [*CACHE_TYPES, "off"])
def test_one_request_with_an_image_three_times_processes_it_once(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm, image = llm_of(cache_type), make_new_png()
    calls, queries = Calls(monkeypatch, llm), QueryCount(llm)
    (output,) = llm.generate(make_prompt(image, image, image), use_tqdm=False)
    assert calls.take() == ONCE
    assert queries.get() == ((0, 0) if cache_type == "off" else (3, 2))
    assert len({item.mm_hash for item in output.mm_items}) == 1


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_second_readonly_request_decodes_nothing(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm, prompt = llm_of(cache_type), make_prompt(make_new_png())
    before = get_statistics(llm)
    calls = Calls(monkeypatch, llm)
    looks = [process(llm, prompt, skip_mm_cache=True) for _ in range(2)]
    assert calls.take() == ONCE
    assert [look.items[0].handle.is_hit for look in looks] == [False, True]
    first, second = (look.items[0].handle.kwargs for look in looks)
    assert first is not None
    assert second is not None
    assert all(torch.equal(first[name], second[name]) for name in first)
    for look in looks:
        release(llm, look, readonly=True)
    assert get_statistics(llm) == before
    readonly = llm.media_parts.caches.readonly.statistics()
    assert readonly.num_queries >= 2
    assert readonly.num_hits >= 1


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_readonly_request_keeps_the_order_of_the_main_cache(
    llm_of: LlmOf, tiny_model: TinyModel, cache_type: str
) -> None:
    """Room for two: the first is the next to go, however often it is only looked at."""
    images = [make_new_png() for _ in range(3)]
    size = process_and_release(llm_of("off"), make_prompt(images[0])).items[0].handle.num_bytes
    gigabytes = 2.5 * size / 2**30
    options = {"mm_processor_cache_type": cache_type, "mm_processor_cache_gb": gigabytes}
    with make_llm(tiny_model("llava"), max_model_len=256, **options) as llm:
        for image in images[:2]:
            process_and_release(llm, make_prompt(image))
        for _ in range(2):
            process_and_release(llm, make_prompt(images[0]), readonly=True)
        process_and_release(llm, make_prompt(images[2]))
        found = [process(llm, make_prompt(image), skip_mm_cache=False) for image in images[1:]]
        assert [entry.items[0].handle.is_hit for entry in found] == [True, True]
        for entry in found:
            release(llm, entry)
        queries = QueryCount(llm)
        process_and_release(llm, make_prompt(images[0]))
        assert queries.get() == (1, 0)
        assert_idle(llm)


def test_readonly_requests_read_the_main_cache_in_shared_memory(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, prompt = llm_of("shm"), make_prompt(make_new_png())
    processed = process_and_release(llm, prompt)
    calls, before = Calls(monkeypatch, llm), get_statistics(llm)
    look = process(llm, prompt, skip_mm_cache=True)
    assert calls.take() == {}
    assert look.items[0].handle.kwargs is not None
    assert look.request.prompt_token_ids == processed.request.prompt_token_ids
    release(llm, look, readonly=True)
    assert get_statistics(llm) == before


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_the_form_of_the_bytes_does_not_matter(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm, data = llm_of(cache_type), make_new_png()
    limits: Any = llm.media_parts.loader._limits
    path = Path(limits.allowed_local_path) / "picture.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + b64encode(data).decode()
    forms = [url, data, bytearray(data), memoryview(data), path.as_uri()]
    calls, queries = Calls(monkeypatch, llm), QueryCount(llm)
    hashes = {process_and_release(llm, make_prompt(form)).items[0].handle.mm_hash for form in forms}
    assert len(hashes) == 1
    assert calls.take() == ONCE
    assert queries.get() == (5, 4)


def test_pixels_in_process_also_hit_the_cache(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, image = llm_of("lru"), make_new_image()
    array = np.array(image)
    calls = Calls(monkeypatch, llm)
    for form in (image, image.copy(), array, array.copy(), torch.from_numpy(array.copy())):
        process_and_release(llm, make_prompt(form))
    assert calls.take() == {"process": 3, "call": 3}  # a PIL image, an array, a tensor


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_salts_share_nothing(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm, data = llm_of(cache_type), make_new_png()
    calls = Calls(monkeypatch, llm)
    plain = make_prompt(data)
    salted = make_prompt(data, cache_salt="mine")
    outputs = [llm.generate(prompt, use_tqdm=False)[0] for prompt in (plain, salted, salted)]
    assert calls.take() == {"decode": 2, "process": 2, "call": 2}
    assert [output.mm_items[0].is_processor_hit for output in outputs] == [False, False, True]
    assert [output.num_encoder_hits for output in outputs[:2]] == [0, 0]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, True]
    assert outputs[0].mm_items[0].mm_hash != outputs[1].mm_items[0].mm_hash


def test_options_of_processing_and_decoding_make_another_item(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, data = llm_of("lru"), make_new_png()
    calls = Calls(monkeypatch, llm)
    options: list[dict[str, Any]] = [
        {},
        {"mm_processor_kwargs": {"do_normalize": False}},
        {"media_io_kwargs": {"image": {"background": [0, 0, 0]}}},
        {"media_io_kwargs": {"image": {"background": [255, 255, 255]}}},  # the default
    ]
    for fields in options:
        process_and_release(llm, make_prompt(data, **fields))
    counts = calls.take()
    # The processor is also called to see what options of a request would cost.
    assert (counts["decode"], counts["process"]) == (3, 3)


@pytest.mark.parametrize("cache_type", [*CACHE_TYPES, "off"])
def test_a_bad_item_is_named_and_costs_its_neighbours_nothing(
    llm_of: LlmOf, cache_type: str
) -> None:
    llm = llm_of(cache_type)
    good = [make_prompt(make_new_png(), text=text) for text in ("one", "two")]
    expected = generate(llm_of("off"), *good)
    data = make_new_png()
    bad = make_prompt(data, data[: len(data) // 2], make_new_png())
    outputs = llm.generate([good[0], bad, good[1]], use_tqdm=False, return_errors=True)
    assert isinstance(outputs[1].error, RequestError)
    assert str(outputs[1].error).startswith("multi_modal_data.image[1]: ")
    assert_idle(llm)
    forget_outputs(llm)
    assert generate(llm, *good) == expected


@pytest.mark.parametrize("skip_mm_cache", [False, True])
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_refusal_keeps_what_was_processed_and_holds_nothing(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str, skip_mm_cache: bool
) -> None:
    """A marker too many: the text is looked at when the images are there already."""
    llm, data = llm_of(cache_type), make_new_png()
    calls = Calls(monkeypatch, llm)
    with pytest.raises(RequestError, match="2 '<image>' marker"):
        process(llm, make_prompt(data, text="<image>?"), skip_mm_cache=skip_mm_cache)
    assert_idle(llm)
    assert calls.take() == ONCE
    process_and_release(llm, make_prompt(data), readonly=skip_mm_cache)
    assert calls.take() == {}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llava_next", {"image_grid_pinpoints": [[2**20, 2**20]]}),
        ("internvl", {"crop_to_patches": True, "max_patches": 10**6}),
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 10**4}),
        ("qwen2_5_vl", {"min_pixels": 2**40}),
        ("qwen2_5_vl", {"size": {"shortest_edge": 2**40, "longest_edge": 2**40}}),
        ("qwen2_audio", {"padding": "max_length", "max_length": 2**40}),
    ],
    ids=str,
)
def test_media_that_would_take_all_memory_of_a_machine_is_refused(
    tiny_model: TinyModel, family: str, options: dict[str, Any]
) -> None:
    directory = tiny_model(family)
    processor = MultiModalProcessor(directory, load_config(directory, trust_remote_code=False))
    with pytest.raises(RequestError, match="at most"):
        check_processor_kwargs(processor, options)
    check_processor_kwargs(processor, dict.fromkeys(options, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colour": "blue"}, "unknown option 'colour'"),
        ({"return_tensors": "np"}, "unknown option 'return_tensors'"),
        ({"device": "cuda"}, "unknown option 'device'"),
        ({"size": {"shortest_edge": 10**6}}, "size.shortest_edge may be 8192 at most"),
        ({"size": {"height": 10**6, "width": 8}}, "size.height may be 8192 at most"),
        ({"crop_size": {"height": 9000, "width": 9000}}, "crop_size.height may be 8192"),
        ({"size": [8, [10**6]]}, "size may be 8192"),
        ({"size": {"height": float("inf"), "width": 8}}, "size.height may be"),
        ({"size": {"height": float("nan"), "width": 8}}, "size.height may be"),
        ({"size": {"height": -(10**9), "width": 8}}, "size.height may be"),
        ({"size": {"height": 10**400, "width": 8}}, "size.height may be"),
        ({"size": {"height": np.int64(10**9), "width": 8}}, "size.height may be"),
        ({"rescale_factor": 1e30}, "rescale_factor may be 256 at most"),
        ({"image_seq_length": 2**30}, "image_seq_length may be"),
        ({"padding": "max_length", "max_length": 2**24}, "unknown option 'padding'"),
        ({"pad_to_multiple_of": 2**24}, "unknown option 'pad_to_multiple_of'"),
        ({1: 2}, "names are text"),
    ],
    ids=str,
)
def test_options_that_ask_for_too_much_are_refused_before_anything_is_done(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, options: dict[Any, Any], message: str
) -> None:
    llm = llm_of("lru")
    calls = Calls(monkeypatch, llm)
    for readonly in (False, True):
        prompt = make_prompt(make_new_png(), mm_processor_kwargs=options)
        with pytest.raises(RequestError, match=message):
            process(llm, prompt, skip_mm_cache=readonly)
    assert calls.take() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mm_processor_kwargs": {"bogus": 1}}, "unknown option 'bogus'"),
        ({"mm_processor_kwargs": {"size": {"shortest_edge": 10**9}}}, "size"),
        ({"media_io_kwargs": {"image": {"bogus": 1}}}, "image: unknown option bogus"),
    ],
)
def test_options_for_every_item_are_checked_at_the_start(
    tiny_model: Callable[[str], str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        make_llm(tiny_model("llava"), **options)


def test_a_closed_engine_raises_a_clear_error(tiny_model: Callable[[str], str]) -> None:
    with make_llm(tiny_model("llama")) as llm:
        pass
    with pytest.raises(RequestError, match="this LLM is closed"):
        llm.generate("hello", use_tqdm=False)
    with pytest.raises(RequestError, match="this LLM is closed"):
        next(llm.stream("hello"))


def test_a_forbidden_address_is_refused_with_its_error_type(
    tiny_model: Callable[[str], str],
) -> None:
    llm = make_llm(tiny_model("llava"))
    prompt = {"prompt": "<image>?", "multi_modal_data": {"image": "http://127.0.0.1:9/a.png"}}
    with pytest.raises(MediaFetchError, match=r"image\[0\]: media from 127\.0\.0\.1"):
        llm.generate(prompt, use_tqdm=False)
    (output,) = llm.generate(prompt, use_tqdm=False, return_errors=True)
    assert isinstance(output.error, MediaFetchError)
