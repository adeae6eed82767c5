from __future__ import annotations

from dataclasses import replace

import pytest

from sensorium.core.admission import (
    Limits,
    check_growth,
    check_request,
    get_max_tokens,
    get_unsplittable_spans,
)
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import KVCacheGroup

LIMITS = Limits(
    max_model_len=20,
    max_num_batched_tokens=8,
    max_num_seqs=4,
    encoder_cache_size=6,
    max_num_encoder_embeds=6,
)
T, F = True, False


def make(
    num_tokens: int, *places: PlaceholderRange, max_tokens: int | None = 16
) -> EngineCoreRequest:
    features = tuple(
        MultiModalFeatureSpec(modality="image", mm_hash=f"hash {index}", mm_position=place)
        for index, place in enumerate(places)
    )
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=(1,) * num_tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        mm_features=features,
    )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make(0), "the prompt is empty"),
        (make(20), "the prompt has 20 tokens, but the context holds 20 and needs room for at"),
        (make(9, PlaceholderRange(0, 7)), "image item 0 needs 7 embeddings.*cache holds 6"),
        (make(9, PlaceholderRange(2, 0)), "image item 0 has no placeholder tokens in the prompt"),
        (
            make(9, PlaceholderRange(0, 4), PlaceholderRange(3, 2)),
            r"image item 1 begins at token 3, but the previous item ends at 4",
        ),
        (
            make(9, PlaceholderRange(5, 2), PlaceholderRange(1, 2)),
            r"image item 1 begins at token 1, but the previous item ends at 7",
        ),
        (
            make(9, PlaceholderRange(6, 4)),
            "image item 0 ends at token 10, but the prompt has only 9 tokens",
        ),
    ],
)
def test_refusal_names_what_is_wrong(request_: EngineCoreRequest, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_request(request_, LIMITS)


def test_refusal_names_the_item_by_its_place_in_its_modality() -> None:
    request = make(9, PlaceholderRange(0, 1), PlaceholderRange(1, 1), PlaceholderRange(2, 7))
    first, *others = request.mm_features
    features = (replace(first, modality="audio"), *others)
    with pytest.raises(RequestError, match="image item 1 needs 7 embeddings") as refused:
        check_request(replace(request, mm_features=features), LIMITS)
    assert refused.value.path == ("multi_modal_data", "image", 1)


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (make(5, max_tokens=9), "max_tokens"),
        (make(5, max_tokens=None), "max_tokens"),
        (make(12, max_tokens=1), "prompt"),
    ],
)
def test_a_request_that_outgrows_the_cache_names_the_field_that_is_too_large(
    request_: EngineCoreRequest, path: str
) -> None:
    cache = KVCacheManager([KVCacheGroup(num_blocks=4)], block_size=4)
    with pytest.raises(RequestError, match="more than the whole KV cache holds") as refused:
        check_growth(request_, LIMITS, (), cache)
    assert refused.value.path == (path,)
    check_growth(make(5, max_tokens=7), LIMITS, (), cache)


def test_what_just_fits_is_accepted() -> None:
    check_request(make(1), LIMITS)
    check_request(make(19, PlaceholderRange(0, 6), PlaceholderRange(6, 6)), LIMITS)
    check_request(make(10, PlaceholderRange(0, 10, (T,) * 6 + (F,) * 4)), LIMITS)


def test_encoder_decoder_items_lie_outside_the_prompt() -> None:
    limits = replace(LIMITS, is_encoder_decoder=True)
    check_request(make(2, PlaceholderRange(0, 6)), limits)
    with pytest.raises(
        RequestError, match="image item 0 begins at token 1: an encoder-decoder model"
    ):
        check_request(make(2, PlaceholderRange(1, 6)), limits)


def test_encoder_decoder_items_must_fit_together() -> None:
    limits = replace(LIMITS, is_encoder_decoder=True)
    check_request(make(2, PlaceholderRange(0, 3), PlaceholderRange(0, 3)), limits)
    with pytest.raises(RequestError, match="the 2 media items need 7 embeddings at once"):
        check_request(make(2, PlaceholderRange(0, 3), PlaceholderRange(0, 4)), limits)
    twice = make(2, PlaceholderRange(0, 4), PlaceholderRange(0, 4))
    features = tuple(replace(feature, mm_hash="same") for feature in twice.mm_features)
    check_request(replace(twice, mm_features=features), limits)


def test_request_grows_to_its_max_tokens_or_to_the_context() -> None:
    assert get_max_tokens(make(5, max_tokens=3), LIMITS) == 8
    assert get_max_tokens(make(5, max_tokens=99), LIMITS) == 20
    assert get_max_tokens(make(5, max_tokens=None), LIMITS) == 20


def test_spans_are_what_the_limits_ask_for() -> None:
    features = make(12, PlaceholderRange(0, 5, (F, T, T, F, T)), PlaceholderRange(6, 2)).mm_features
    whole = replace(LIMITS, bidirectional_modalities=frozenset({"image"}))
    unchunked = replace(LIMITS, disable_chunked_mm_input=True)
    assert get_unsplittable_spans(features, LIMITS) == ()
    assert get_unsplittable_spans(features, whole) == ((1, 3), (4, 5), (6, 8))
    assert get_unsplittable_spans(features, unchunked) == ((0, 5), (6, 8))
    both = replace(whole, disable_chunked_mm_input=True)
    assert get_unsplittable_spans(features, both) == ((0, 5), (6, 8))
    assert get_unsplittable_spans(features, replace(both, is_encoder_decoder=True)) == ()


@pytest.mark.parametrize("disable_chunked_mm_input", [False, True])
def test_adjacent_items_that_would_merge_are_refused(disable_chunked_mm_input: bool) -> None:
    limits = replace(
        LIMITS,
        bidirectional_modalities=frozenset({"image"}),
        disable_chunked_mm_input=disable_chunked_mm_input,
    )
    touching = make(9, PlaceholderRange(0, 2), PlaceholderRange(2, 2)).mm_features
    with pytest.raises(RequestError, match="two media items meet at token 2") as refused:
        get_unsplittable_spans(touching, limits)
    assert refused.value.path == ("prompt",)


def test_items_may_touch_where_only_their_position_distinguishes_them() -> None:
    limits = replace(LIMITS, disable_chunked_mm_input=True)
    touching = make(9, PlaceholderRange(0, 2), PlaceholderRange(2, 2)).mm_features
    assert get_unsplittable_spans(touching, limits) == ((0, 2), (2, 4))
