"""Every field of a prompt that was rendered elsewhere is checked.

A bad one is named, and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from sensorium import RequestError
from sensorium.types.multimodal import ItemLayout, PlaceholderRange
from tests.integration.media_steps import (
    CACHE_TYPES,
    GREEDY,
    LlmOf,
    assert_idle,
    generate,
    get_statistics,
    make_new_png,
    make_prompt,
)
from tests.integration.rendering import Rendered, make_hash, render

# From a good prompt of two images of 16 placeholders each, at 0 and 16.
Change = Callable[[dict[str, Any], Rendered], dict[str, Any]]
SIZE = 16


def set_field(name: str, value: Any) -> Change:
    return lambda prompt, _: {**prompt, name: value}


def set_images(name: str, *values: Any) -> Change:
    return set_field(name, {"image": list(values)})


def set_first(name: str, value: Any) -> Change:
    """The first entry of a list; the second stays."""
    return lambda prompt, _: {**prompt, name: {"image": [value, prompt[name]["image"][1]]}}


def at(offset: Any, length: Any, **mask: Any) -> dict[str, Any]:
    return {"offset": offset, "length": length, **mask}


def change_tokens(change: Callable[[list[int]], list[int]]) -> Change:
    return lambda prompt, _: {
        **prompt,
        "prompt_token_ids": change(list(prompt["prompt_token_ids"])),
    }


def drop_fields(*names: str) -> Change:
    return lambda prompt, _: {k: v for k, v in prompt.items() if k not in names}


BAD: dict[str, tuple[Change, str]] = {
    "a layout object of other types": (
        set_images("mm_layouts", ItemLayout(text=3, token_id="x", num_embeds=1), None),  # type: ignore[arg-type]
        "a layout's text must be Unicode",
    ),
    "a layout whose text is not Unicode": (
        set_images("mm_layouts", {"text": "\ud800", "token_id": 1, "num_embeds": 1}, None),
        "a layout's text must be Unicode",
    ),
    "a placeholder object of fractions": (
        set_first("mm_placeholders", PlaceholderRange(0.0, 16.0)),  # type: ignore[arg-type]
        "integers >= 0",
    ),
    "hashes of another type": (set_field("mm_hashes", ["a", "b"]), "mm_hashes: must be Mapping"),
    "a text of hashes": (
        set_field("mm_hashes", {"image": "ab"}),
        "mm_hashes.image: must be a list",
    ),
    "too few hashes": (set_images("mm_hashes", "a"), "mm_placeholders.image: has 2 entries"),
    "a number for a hash": (
        set_images("mm_hashes", "a", 7),
        r"mm_hashes.image\[1\]: a hash must be a text",
    ),
    "an empty hash": (
        set_images("mm_hashes", "", "b"),
        r"mm_hashes.image\[0\]: a hash must be a text",
    ),
    "a long hash": (
        set_images("mm_hashes", "a" * 129, "b"),
        r"mm_hashes.image\[0\]: a hash must be a text",
    ),
    "another modality": (
        lambda prompt, _: {**prompt, "mm_hashes": {"audio": ["a", "b"]}},
        "mm_placeholders: has image, which is not in mm_hashes",
    ),
    "an unknown modality": (
        lambda prompt, _: {
            name: {"smell": value["image"]} if isinstance(value, dict) else value
            for name, value in prompt.items()
        },
        "takes no smell",
    ),
    "no hashes": (drop_fields("mm_hashes"), "mm_hashes"),
    "no placeholders": (drop_fields("mm_placeholders"), "mm_placeholders.image:"),
    "too few placeholders": (set_images("mm_placeholders", at(0, SIZE)), "mm_placeholders.im"),
    "kwargs of another type": (set_field("mm_kwargs", [1]), "mm_kwargs: must be Mapping"),
    "too few kwargs": (set_images("mm_kwargs", None), "mm_kwargs.image: has 1 entries"),
    "stray kwargs": (
        lambda prompt, _: {**prompt, "mm_kwargs": {**prompt["mm_kwargs"], "audio": [None]}},
        "mm_kwargs: has audio, which is not in mm_hashes",
    ),
    "an item that is no mapping": (
        set_first("mm_kwargs", 3),
        r"mm_kwargs.image\[0\]: tensors must be a map from names",
    ),
    "another name": (
        set_first("mm_kwargs", {"pixels": torch.zeros(1, 3, 56, 56)}),
        r"mm_kwargs.image\[0\]: the tensors for image must be pixel_values, not pixels",
    ),
    "another dtype": (
        set_first("mm_kwargs", {"pixel_values": torch.zeros(1, 3, 56, 56).half()}),
        r"mm_kwargs.image\[0\]: pixel_values must be torch.float32",
    ),
    "another shape": (
        set_first("mm_kwargs", {"pixel_values": torch.zeros(56, 56)}),
        r"mm_kwargs.image\[0\]: pixel_values must be",
    ),
    "too few layouts": (set_images("mm_layouts", None), "mm_layouts.image: has 1 entries"),
    "a bad layout": (
        set_images("mm_layouts", {"text": "x"}, None),
        r"mm_kwargs.image\[0\]: a layout must have",
    ),
    "no place": (
        set_first("mm_placeholders", None),
        r"mm_placeholders.image\[0\]: a placeholder must have",
    ),
    "no length": (
        set_first("mm_placeholders", {"offset": 0}),
        r"mm_placeholders.image\[0\]: a placeholder must have",
    ),
    "a place before the prompt": (set_first("mm_placeholders", at(-1, SIZE)), "integers >= 0"),
    "a fraction": (set_first("mm_placeholders", at(0.5, SIZE)), "integers >= 0"),
    "a truth": (set_first("mm_placeholders", at(True, SIZE)), "integers >= 0"),
    "a text": (set_first("mm_placeholders", at("0", SIZE)), "integers >= 0"),
    "a place beyond the prompt": (
        set_first("mm_placeholders", at(10**9, SIZE)),
        r"image\[0\]: ends at token",
    ),
    "a length beyond the prompt": (
        set_first("mm_placeholders", at(0, 10**12)),
        r"image\[0\]: ends at token",
    ),
    "a mask of another length": (
        set_first("mm_placeholders", at(0, SIZE, is_embed=[True] * 3)),
        r"image\[0\]: is_embed has 3 entries for a placeholder of 16",
    ),
    "an empty mask": (
        set_first("mm_placeholders", at(0, SIZE, is_embed=[])),
        "is_embed|placeholder tokens",
    ),
    "a mask of text": (set_first("mm_placeholders", at(0, SIZE, is_embed="TTT")), "is_embed"),
    "a mask of numbers": (set_first("mm_placeholders", at(0, SIZE, is_embed=[2] * SIZE)), "is_emb"),
    "a mask without embeddings": (
        set_first("mm_placeholders", at(0, SIZE, is_embed=[False] * SIZE)),
        "placeholder tokens",
    ),
    "the same place twice": (
        set_images("mm_placeholders", at(0, SIZE), at(0, SIZE)),
        "must not overlap",
    ),
    "places that overlap": (
        set_images("mm_placeholders", at(0, SIZE), at(8, SIZE)),
        "must not overlap",
    ),
    "a place of text": (
        lambda prompt, _: {
            **prompt,
            "mm_placeholders": {"image": [at(0, SIZE), PlaceholderRange(SIZE + 2, SIZE)]},
        },
        r"image\[1\]: has embeddings at tokens 18 to 34 \(exclusive\), but not all of them are",
    ),
    "placeholders that belong to no item": (
        change_tokens(lambda tokens: [*tokens, tokens[0]]),
        "33 placeholder tokens for media, but mm_placeholders cover 32",
    ),
    "fewer placeholders": (change_tokens(lambda tokens: tokens[1:]), "not all of them are"),
    "no tokens": (change_tokens(lambda _: []), r"image\[0\]: ends at token"),
    "negative tokens": (
        change_tokens(lambda tokens: [-1, *tokens[1:]]),
        "token ids must be integers",
    ),
    "text instead of tokens": (
        lambda prompt, _: {**drop_fields("prompt_token_ids")(prompt, _), "prompt": "<image> hello"},
        "prompt_token_ids",
    ),
    "media and rendered media": (
        set_field("multi_modal_data", {"image": [b"x"]}),
        "multi_modal_data",
    ),
    "uuids and hashes": (
        set_field("multi_modal_uuids", {"image": ["x", "y"]}),
        "multi_modal_uu",
    ),
    "options of a processor": (
        set_field("mm_processor_kwargs", {"do_normalize": False}),
        "mm_processor_kwargs",
    ),
}


@pytest.fixture(scope="module")
def cached() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(("name", "cache_type"), list(zip(BAD, cycle(CACHE_TYPES), strict=False)))
def test_a_bad_field_is_named_and_leaves_nothing(
    llm_of: LlmOf, cached: dict[str, Any], cache_type: str, name: str
) -> None:
    llm = llm_of(cache_type)
    if not cached:
        good = make_prompt(make_new_png(), make_new_png())
        cached["rendered"] = render(llm_of("off"), good)
        cached["expected"] = generate(llm_of("off"), good)
    rendered = cached["rendered"]
    change, message = BAD[name]
    prompt = rendered.make_prompt(make_hash(), make_hash())
    before = get_statistics(llm).num_items
    with pytest.raises(RequestError, match=message):
        llm.generate(change(prompt, rendered), GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert get_statistics(llm).num_items == before
    assert generate(llm, prompt) == cached["expected"]
