"""Tensors that don't fit the model fail in the core, and only the request that brought them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from sensorium import RequestError
from sensorium.types.multimodal import Transfer
from tests.integration.neighbours import PARAMS, Change, Neighbours, make_prompt
from tests.parity.cases import make_image
from tests.support.engine import (
    add_with_tensors,
    assert_nothing_is_left,
    process_with_tensors,
)

NeighboursOf = Callable[[str], Neighbours]


def make_bad_image(family: str) -> dict[str, object]:
    return make_prompt(family, make_image(60, 60, seed=70), text="which one is bad?")


def change_pixels(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda item: {**item, "pixel_values": change(item["pixel_values"])}


def change_grid(*grid: tuple[int, ...]) -> Change:
    return lambda item: {**item, "image_grid_thw": torch.tensor(grid)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_pixels(lambda pixels: pixels * torch.nan), "not finite"),
        (change_pixels(lambda pixels: pixels + torch.inf), "not finite"),
        (change_pixels(lambda pixels: pixels[0, 0]), "could not be encoded"),
        (change_pixels(lambda pixels: torch.cat([pixels] * 2)), "gave 32 embeddings .* need 16"),
        (change_pixels(lambda pixels: pixels[:0]), "could not be encoded"),
        (lambda _: {}, "could not be encoded"),
    ],
    ids=["nan", "inf", "flat", "two images", "no image", "no tensors"],
)
@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_pixels_that_do_not_fit_fail_alone(
    neighbours_of: NeighboursOf, family: str, change: Change, message: str
) -> None:
    error = neighbours_of(family).fail_with_tensors(make_bad_image(family), change)
    assert re.search(message, error)
    assert "image" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_pixels(lambda pixels: pixels * torch.nan), "not finite"),
        (change_pixels(lambda pixels: pixels[:-1]), "could not be encoded"),
        (change_grid((1, 2, 2)), "no positions"),
        (change_grid((1, 8, 8)), "no positions"),
        (change_grid((1, -4, -4)), "no positions"),
        (change_grid((1, 4, 4), (1, 4, 4)), "could not be encoded"),
        (lambda item: {"pixel_values": item["pixel_values"]}, "no positions"),
    ],
    ids=["nan", "a row less", "small", "large", "negative", "two grids", "no grid"],
)
def test_grids_that_do_not_fit_fail_alone(
    neighbours_of: NeighboursOf, change: Change, message: str
) -> None:
    neighbours = neighbours_of("qwen2_5_vl")
    assert re.search(message, neighbours.fail_with_tensors(make_bad_image("qwen2_5_vl"), change))


def test_missing_tensors_are_requested_again(neighbours_of: NeighboursOf) -> None:
    llm = neighbours_of("llava").llm
    # No other test has sent this picture, so the core can't have its tensors.
    prompt = make_prompt("llava", make_image(60, 60, seed=69), text="which one is new?")
    processed, _ = process_with_tensors(llm, "new", prompt, PARAMS)
    missing = llm.core.add_request(processed.request, Transfer())
    assert missing is not None
    assert missing.mm_hashes == (processed.request.mm_features[0].mm_hash,)
    assert_nothing_is_left(llm)


def test_a_request_id_in_use_is_refused(neighbours_of: NeighboursOf) -> None:
    llm = neighbours_of("llava").llm
    processed, tensors = process_with_tensors(llm, "twice", make_bad_image("llava"), PARAMS)
    add_with_tensors(llm, processed.request, tensors)
    with pytest.raises(RequestError, match="'twice' is in use"):
        add_with_tensors(llm, processed.request, tensors)
    assert len(llm.core.payloads) == 1
    llm.core.abort_requests(["twice"])
    assert_nothing_is_left(llm)


def test_a_bad_item_fails_all_requests_with_it_and_is_not_kept(
    neighbours_of: NeighboursOf,
) -> None:
    llm = neighbours_of("llava").llm
    prompt = make_bad_image("llava")
    for request_id in ("first", "second"):
        processed, tensors = process_with_tensors(llm, request_id, prompt, PARAMS)
        (mm_hash,) = tensors
        broken = {"pixel_values": tensors[mm_hash]["pixel_values"] * torch.nan}
        add_with_tensors(llm, processed.request, {mm_hash: broken})
    outputs = [output for _ in range(2) for output in llm.core.step()]
    assert [(output.request_id, output.finish_reason) for output in outputs] == [
        ("first", "error"),
        ("second", "error"),
    ]
    assert_nothing_is_left(llm)
    assert llm.generate(prompt, PARAMS, use_tqdm=False)[0].error is None


def test_wrong_counts_that_add_up_are_found(neighbours_of: NeighboursOf) -> None:
    """One item brings two images, a good one follows, another brings none: as many as expected."""
    llm = neighbours_of("llava").llm
    llm.core.scheduler.encoder_cache.clear_cache()
    images = [make_image(60, 60, seed=seed) for seed in (71, 72, 73)]
    expected = llm.generate(make_prompt("llava", images[1]), PARAMS, use_tqdm=False)
    llm.core.scheduler.encoder_cache.clear_cache()
    llm.core.scheduler.kv_cache.clear_cache()
    good_tokens = []
    for name, image, count in zip(("two", "good", "none"), images, (2, 1, 0), strict=True):
        prompt = make_prompt("llava", image)
        processed, tensors = process_with_tensors(llm, name, prompt, PARAMS)
        (mm_hash,) = tensors
        pixels = tensors[mm_hash]["pixel_values"].repeat(count, 1, 1, 1)
        add_with_tensors(llm, processed.request, {mm_hash: {"pixel_values": pixels}})
    while llm.core.has_requests:
        for output in llm.core.step():
            good_tokens.extend(output.new_token_ids if output.request_id == "good" else ())
    llm.core.scheduler.encoder_cache.clear_cache()
    assert tuple(good_tokens) == expected[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llava", change_pixels(lambda pixels: pixels[:, :, :28, :28])),
        ("llava", change_pixels(lambda pixels: pixels[:, :2])),
        ("gemma3", change_pixels(lambda pixels: pixels[:, :, :56, :56])),
        ("qwen2_5_vl", change_pixels(lambda pixels: pixels[:, :-1])),
    ],
    ids=["small", "two channels", "small for Gemma", "narrow patches"],
)
def test_a_shape_that_fails_alone_also_fails_in_a_batch(
    neighbours_of: NeighboursOf, family: str, change: Change
) -> None:
    neighbours = neighbours_of(family)
    error = neighbours.fail_with_tensors(make_bad_image(family), change)
    assert "could not be encoded" in error


def test_an_image_size_that_fails_alone_also_fails_in_a_batch(neighbours_of: NeighboursOf) -> None:
    """The same through the front door: Gemma's images take 16 tokens, whatever their size."""
    neighbours = neighbours_of("gemma3")
    options = {"mm_processor_kwargs": {"size": {"height": 56, "width": 56}}}
    prompt = {**make_bad_image("gemma3"), **options}
    with pytest.raises(RequestError, match="could not be encoded"):
        neighbours.llm.generate(prompt, PARAMS, use_tqdm=False)
    assert "could not be encoded" in neighbours.fail(prompt)
