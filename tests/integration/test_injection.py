"""Media that was processed elsewhere: put into the cache, or sent with a rendered prompt."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from sensorium import LLM, RequestError
from sensorium.types.errors import MissingMediaError
from sensorium.types.multimodal import ItemLayout, ShmReference
from tests.integration.media_steps import (
    CACHE_TYPES,
    GREEDY,
    Calls,
    LlmOf,
    QueryCount,
    assert_idle,
    forget_outputs,
    generate,
    get_statistics,
    make_new_png,
    make_prompt,
    process,
    release,
)
from tests.integration.rendering import Rendered, make_hash, render
from tests.support.engine import get_token_ids

ALL_TYPES = [*CACHE_TYPES, "off"]


def inject(llm: LLM, mm_hash: str, kwargs: Any, layout: Any = None) -> Any:
    layouts = None if layout is None else {"image": [layout]}
    stored = llm.input_processor.inject_into_mm_cache(
        {"image": [mm_hash]}, {"image": [kwargs]}, layouts
    )
    return stored["image"][0]


def chat(llm: LLM, image: object) -> Any:
    content = [{"type": "image", "image": image}, {"type": "text", "text": "what is this?"}]
    (output,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    return output


@pytest.fixture
def picture(llm_of: LlmOf) -> tuple[bytes, Rendered]:
    """A new image, and what its processing gives."""
    data = make_new_png()
    return data, render(llm_of("lru"), make_prompt(data))


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_the_first_injection_is_a_miss_and_the_second_a_hit(
    llm_of: LlmOf, cache_type: str, picture: tuple[bytes, Rendered]
) -> None:
    llm, mm_hash = llm_of(cache_type), make_hash()
    (kwargs,) = picture[1].kwargs
    queries = QueryCount(llm)
    stored = inject(llm, mm_hash, kwargs)
    assert queries.get() == (1, 0)
    assert_idle(llm)
    again = inject(llm, mm_hash, kwargs)
    assert queries.get() == (2, 1)
    if cache_type == "shm":
        assert isinstance(stored, ShmReference)
        assert again == stored
    else:
        assert stored.keys() == kwargs.keys()


def test_without_a_cache_injection_does_nothing(
    llm_of: LlmOf, caplog: pytest.LogCaptureFixture, picture: tuple[bytes, Rendered]
) -> None:
    llm = llm_of("off")
    inject(llm, make_hash(), picture[1].kwargs[0])
    assert get_statistics(llm).num_queries == 0
    assert caplog.records == []


@pytest.mark.parametrize("cache_type", ALL_TYPES)
def test_a_rendered_prompt_with_a_new_hash_generates(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm = llm_of(cache_type)
    prompt = make_prompt(make_new_png(), make_new_png())
    expected = generate(llm_of("off"), prompt)
    rendered = render(llm_of("off"), prompt)
    hashes = make_hash(), make_hash()
    calls, queries = Calls(monkeypatch, llm), QueryCount(llm)
    assert generate(llm, rendered.make_prompt(*hashes)) == expected
    if cache_type != "off":
        assert queries.get() == (2, 0)
        forget_outputs(llm)
        for known in ({"mm_kwargs": {"image": [None, None]}}, {"mm_kwargs": {}}):
            assert generate(llm, rendered.make_prompt(*hashes, **known)) == expected
        assert queries.get() == (6, 4)
    calls.counts.pop("process", None)  # of the dummy that tells what tensors look like
    assert calls.take().get("decode") is None


@pytest.mark.parametrize("cache_type", ALL_TYPES)
def test_placeholders_may_be_mappings_in_any_order(llm_of: LlmOf, cache_type: str) -> None:
    llm, prompt = llm_of(cache_type), make_prompt(make_new_png(), make_new_png())
    expected = generate(llm_of("off"), prompt)
    rendered = render(llm_of("off"), prompt)
    ranges = [
        {"offset": position.offset, "length": position.length, "is_embed": [True] * position.length}
        for position in rendered.ranges
    ]
    changes = {
        "mm_placeholders": {"image": ranges[::-1]},
        "mm_kwargs": {"image": rendered.kwargs[::-1]},
    }
    assert generate(llm, rendered.make_prompt(make_hash(), make_hash(), **changes)) == expected


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_injected_items_serve_rendered_prompts(
    llm_of: LlmOf, cache_type: str, picture: tuple[bytes, Rendered]
) -> None:
    llm, mm_hash = llm_of(cache_type), make_hash()
    data, rendered = picture
    queries = QueryCount(llm)
    inject(llm, mm_hash, rendered.kwargs[0])
    prompt = rendered.make_prompt(mm_hash, mm_kwargs={"image": [None]})
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert queries.get() == (2, 1)
    assert output.mm_items[0].is_processor_hit
    assert get_token_ids([output]) == generate(llm_of("off"), make_prompt(data))


@pytest.mark.parametrize("cache_type", ALL_TYPES)
def test_missing_items_that_a_prompt_calls_cached_are_listed(
    llm_of: LlmOf, cache_type: str
) -> None:
    llm = llm_of(cache_type)
    rendered = render(llm_of("lru"), make_prompt(*(make_new_png() for _ in range(3))))
    hashes = [make_hash() for _ in range(3)]
    kwargs = [None, rendered.kwargs[1], None]
    queries = QueryCount(llm)
    with pytest.raises(MissingMediaError) as caught:
        process(llm, rendered.make_prompt(*hashes, mm_kwargs={"image": kwargs}))
    assert caught.value.missing == (hashes[0], hashes[2])
    assert queries.get()[1] == 0
    assert_idle(llm)


@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_later_chat_hits_an_item_injected_with_its_layout(
    llm_of: LlmOf,
    monkeypatch: pytest.MonkeyPatch,
    cache_type: str,
    as_mapping: bool,
    picture: tuple[bytes, Rendered],
) -> None:
    llm, (data, rendered) = llm_of(cache_type), picture
    layout: Any = rendered.layouts[0]
    if as_mapping:
        layout = {name: getattr(layout, name) for name in ("text", "token_id", "num_embeds")}
    inject(llm, rendered.own_hashes[0], rendered.kwargs[0], layout)
    calls, queries = Calls(monkeypatch, llm), QueryCount(llm)
    output = chat(llm, data)
    assert calls.take() == {}
    assert queries.get() == (1, 1)
    assert get_token_ids([output]) == get_token_ids([chat(llm_of("off"), data)])


@pytest.mark.parametrize("way", ["injected", "rendered"])
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_later_chat_processes_an_item_injected_without_layout_once(
    llm_of: LlmOf,
    monkeypatch: pytest.MonkeyPatch,
    cache_type: str,
    way: str,
    picture: tuple[bytes, Rendered],
) -> None:
    llm, (data, rendered) = llm_of(cache_type), picture
    if way == "injected":
        inject(llm, rendered.own_hashes[0], rendered.kwargs[0])
    else:
        generate(llm, rendered.make_prompt(*rendered.own_hashes))
        forget_outputs(llm)
    calls, queries = Calls(monkeypatch, llm), QueryCount(llm)
    output = chat(llm, data)
    assert calls.take() == {"decode": 1, "process": 1, "call": 1}
    assert queries.get() == (1, 0)
    again = chat(llm, data)
    assert calls.take() == {}
    assert queries.get() == (2, 1)
    expected = get_token_ids([chat(llm_of("off"), data)])
    assert get_token_ids([output]) == get_token_ids([again]) == expected


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_layouts_may_come_with_a_rendered_prompt(
    llm_of: LlmOf,
    monkeypatch: pytest.MonkeyPatch,
    cache_type: str,
    picture: tuple[bytes, Rendered],
) -> None:
    llm, (data, rendered) = llm_of(cache_type), picture
    layouts = {"mm_layouts": {"image": rendered.layouts}}
    generate(llm, rendered.make_prompt(*rendered.own_hashes, **layouts))
    calls = Calls(monkeypatch, llm)
    assert chat(llm, data).mm_items[0].is_processor_hit
    assert calls.take() == {}


GARBAGE: dict[str, tuple[Any, Any, Any]] = {
    "nothing": (None, None, None),
    "lists": ([], [], []),
    "no kwargs": ({"image": ["h"]}, None, None),
    "a number of kwargs": ({"image": ["h"]}, {"image": 3}, None),
    "a text of hashes": ({"image": "hhh"}, {"image": ["K", "K", "K"]}, None),
    "a number for a hash": ({"image": [7]}, {"image": ["K"]}, None),
    "no hash": ({"image": [None]}, {"image": ["K"]}, None),
    "a list for a hash": ({"image": [["h"]]}, {"image": ["K"]}, None),
    "an empty hash": ({"image": [""]}, {"image": ["K"]}, None),
    "a long hash": ({"image": ["h" * 129]}, {"image": ["K"]}, None),
    "a surrogate": ({"image": ["\ud800"]}, {"image": ["K"]}, None),
    "an unknown modality": ({"smell": ["h"]}, {"smell": ["K"]}, None),
    "a modality that it lacks": ({"audio": ["h"]}, {"audio": ["K"]}, None),
    "no modality": ({None: ["h"]}, {None: ["K"]}, None),
    "an item that is no mapping": ({"image": ["h"]}, {"image": [[1, 2]]}, None),
    "an empty item": ({"image": ["h"]}, {"image": [{}]}, None),
    "other names": ({"image": ["h"]}, {"image": [{"pixels": torch.zeros(1, 3, 56, 56)}]}, None),
    "no tensor": ({"image": ["h"]}, {"image": [{"pixel_values": [0.0]}]}, None),
    "another dtype": (
        {"image": ["h"]},
        {"image": [{"pixel_values": torch.zeros(1, 3, 56, 56, dtype=torch.float16)}]},
        None,
    ),
    "other dimensions": ({"image": ["h"]}, {"image": [{"pixel_values": torch.zeros(3)}]}, None),
    "no values": ({"image": ["h"]}, {"image": [{"pixel_values": torch.zeros(1, 3, 0, 56)}]}, None),
    "values that are nowhere": (
        {"image": ["h"]},
        {"image": [{"pixel_values": torch.zeros(1, 3, 56, 56, device="meta")}]},
        None,
    ),
    "sparse values": (
        {"image": ["h"]},
        {"image": [{"pixel_values": torch.zeros(1, 3, 56, 56).to_sparse()}]},
        None,
    ),
    "a text for a layout": ({"image": ["h"]}, {"image": ["K"]}, {"image": ["layout"]}),
    "an empty layout": ({"image": ["h"]}, {"image": ["K"]}, {"image": [{}]}),
    "a layout of wrong types": (
        {"image": ["h"]},
        {"image": ["K"]},
        {"image": [{"text": 1, "token_id": "a", "num_embeds": None}]},
    ),
    "a layout with another token": (
        {"image": ["h"]},
        {"image": ["K"]},
        {"image": [ItemLayout(text="<image>", token_id=17, num_embeds=1)]},
    ),
    "a layout that counts otherwise": (
        {"image": ["h"]},
        {"image": ["K"]},
        {"image": [ItemLayout(text="<image><image>", token_id=3, num_embeds=5)]},
    ),
}
QUIET: dict[str, tuple[Any, Any, Any]] = {
    "an absent item": ({"image": ["h"]}, {"image": [None]}, None),
    "an absent modality": ({"image": ["h"]}, {}, None),
    "more hashes": ({"image": ["h", "i"]}, {"image": ["K"]}, None),
    "more items": ({"image": ["h"]}, {"image": ["K", "K"]}, None),
    "more layouts": ({"image": ["h"]}, {"image": ["K"]}, {"image": [None, None]}),
    "an empty dictionary": ({}, {}, {}),
}


def insert_kwargs(value: Any, kwargs: Any) -> Any:
    """The value, with "K" for good tensors replaced by them."""
    if isinstance(value, dict):
        return {
            key: [kwargs if entry == "K" else entry for entry in entries]
            if isinstance(entries, list)
            else entries
            for key, entries in value.items()
        }
    return value


@pytest.mark.parametrize("name", [*GARBAGE, *QUIET])
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_malformed_items_are_not_injected(
    llm_of: LlmOf,
    caplog: pytest.LogCaptureFixture,
    picture: tuple[bytes, Rendered],
    cache_type: str,
    name: str,
) -> None:
    llm, (_, rendered) = llm_of(cache_type), picture
    before = get_statistics(llm)
    hashes, kwargs, layouts = {**GARBAGE, **QUIET}[name]
    kwargs = insert_kwargs(kwargs, rendered.kwargs[0])
    with caplog.at_level(logging.WARNING, logger="sensorium"):
        llm.input_processor.inject_into_mm_cache(hashes, kwargs, layouts)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (name in GARBAGE)
    assert all(record.exc_info for record in warnings)
    assert get_statistics(llm) == before
    assert_idle(llm)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_bad_item_does_not_keep_good_ones_out(
    llm_of: LlmOf, cache_type: str, picture: tuple[bytes, Rendered]
) -> None:
    llm, (data, rendered) = llm_of(cache_type), picture
    good = make_hash(), make_hash()
    (kwargs,) = rendered.kwargs
    stored = llm.input_processor.inject_into_mm_cache(
        {"smell": ["x"], "image": [good[0], "bad", "none", good[1]]},
        {"smell": [kwargs], "image": [kwargs, {"pixel_values": 1}, None, kwargs]},
    )
    assert [entry is None for entry in stored["image"]] == [False, True, True, False]
    expected = generate(llm_of("off"), make_prompt(data))
    for mm_hash in good:
        prompt = rendered.make_prompt(mm_hash, mm_kwargs={"image": [None]})
        assert generate(llm, prompt) == expected


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_fail_alone(
    llm_of: LlmOf, cache_type: str, value: float, picture: tuple[bytes, Rendered]
) -> None:
    llm, (data, rendered) = llm_of(cache_type), picture
    broken = {"pixel_values": torch.full_like(rendered.kwargs[0]["pixel_values"], value)}
    mm_hash = make_hash()
    inject(llm, mm_hash, broken)
    bad = rendered.make_prompt(mm_hash, mm_kwargs={})
    outputs = llm.generate([make_prompt(data), bad], GREEDY, use_tqdm=False, return_errors=True)
    assert "not finite" in str(outputs[1].error)
    assert get_token_ids(outputs[:1]) == generate(llm_of("off"), make_prompt(data))


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_readonly_requests_may_have_rendered_prompts(
    llm_of: LlmOf, cache_type: str, picture: tuple[bytes, Rendered]
) -> None:
    llm, (_, rendered) = llm_of(cache_type), picture
    before, mm_hash = get_statistics(llm), make_hash()
    for kwargs in (rendered.kwargs, [None]):
        prompt = rendered.make_prompt(mm_hash, mm_kwargs={"image": kwargs})
        look = process(llm, prompt, skip_mm_cache=True)
        assert look.items[0].handle.kwargs is not None
        release(llm, look, readonly=True)
    assert get_statistics(llm) == before
    with pytest.raises(MissingMediaError):
        process(llm, rendered.make_prompt(mm_hash, mm_kwargs={}))


def make_short_prompt(rendered: Rendered, mm_hash: str, **changes: Any) -> dict[str, Any]:
    """With half of the image's placeholders."""
    (position,) = rendered.ranges
    place = {"offset": position.offset, "length": position.length - 8}
    return rendered.make_prompt(
        mm_hash,
        prompt_token_ids=rendered.token_ids[8:],
        mm_placeholders={"image": [place]},
        **changes,
    )


def test_fewer_placeholders_than_embeddings_are_refused(
    llm_of: LlmOf, picture: tuple[bytes, Rendered]
) -> None:
    bad = make_short_prompt(picture[1], make_hash())
    with pytest.raises(RequestError, match="makes 16 embeddings, not 8"):
        process(llm_of("lru"), bad)


@pytest.mark.parametrize("is_encoded", [False, True])
def test_fewer_placeholders_than_a_cached_item_has_fail_alone(
    llm_of: LlmOf, picture: tuple[bytes, Rendered], is_encoded: bool
) -> None:
    """Without a layout their number is found by the encoder, which may have run already."""
    llm, (data, rendered), mm_hash = llm_of("lru"), picture, make_hash()
    inject(llm, mm_hash, rendered.kwargs[0])
    if is_encoded:
        generate(llm, rendered.make_prompt(mm_hash))
    bad = make_short_prompt(rendered, mm_hash, mm_kwargs={})
    outputs = llm.generate([bad, make_prompt(data)], GREEDY, use_tqdm=False, return_errors=True)
    assert re.search("(gave|has) 16 embeddings", str(outputs[0].error))
    assert type(outputs[0].error) is RequestError
    assert get_token_ids(outputs[1:]) == generate(llm_of("off"), make_prompt(data))


def test_fewer_placeholders_than_a_layout_says_are_refused(
    llm_of: LlmOf, picture: tuple[bytes, Rendered]
) -> None:
    llm, (_, rendered), mm_hash = llm_of("lru"), picture, make_hash()
    inject(llm, mm_hash, rendered.kwargs[0], rendered.layouts[0])
    with pytest.raises(RequestError, match="belongs to a cached item of 16 embeddings"):
        process(llm, make_short_prompt(rendered, mm_hash, mm_kwargs={}))


def test_one_hash_stands_for_one_item_within_a_prompt(llm_of: LlmOf) -> None:
    llm, mm_hash = llm_of("lru"), make_hash()
    both = render(llm, make_prompt(make_new_png(), make_new_png()))
    with pytest.raises(RequestError, match="has the same hash as image 0, but differs"):
        process(llm, both.make_prompt(mm_hash, mm_hash))
    once = [None, both.kwargs[0]]
    release(llm, process(llm, both.make_prompt(mm_hash, mm_hash, mm_kwargs={"image": once})))
