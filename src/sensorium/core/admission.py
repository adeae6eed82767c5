"""Checks requests before the core accepts them, so that no accepted request can get stuck.

Pure: looks at a request and the limits, and raises a `RequestError` that names the fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalFeatureSpec
from sensorium.types.request import EngineCoreRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a step, and what the model demands of it."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    encoder_cache_size: int
    max_num_encoder_embeds: int
    # The model attends in both directions inside items of these modalities, so that consecutive
    # embeddings of an item must be computed in one step.
    bidirectional_modalities: frozenset[str] = frozenset()
    disable_chunked_mm_input: bool = False  # every item is computed in one step, for any model
    is_encoder_decoder: bool = False
    # A request of more tokens than this is computed in another way (other rotary factors), so that
    # a request that grows beyond it starts again. None: length changes nothing.
    long_after: int | None = None


def check_request(request: EngineCoreRequest, limits: Limits) -> None:
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        raise RequestError("the prompt is empty: at least one token is needed", path=("prompt",))
    check_length(num_tokens, limits.max_model_len)
    _check_features(request.mm_features, num_tokens, limits)


def check_length(num_tokens: int, max_model_len: int) -> None:
    if num_tokens >= max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, but the context holds {max_model_len} "
            "and needs room for at least one new token",
            path=("prompt",),
        )


def get_max_tokens(request: EngineCoreRequest, limits: Limits) -> int:
    """Return how many tokens the request can have at most, prompt and output together."""
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is None:
        return limits.max_model_len
    return min(len(request.prompt_token_ids) + max_tokens, limits.max_model_len)


def _check_features(
    features: Sequence[MultiModalFeatureSpec], num_tokens: int, limits: Limits
) -> None:
    for mm_index, feature in enumerate(features):
        num_embeds = feature.mm_position.get_num_embeds()
        if num_embeds > limits.encoder_cache_size:
            raise RequestError(
                f"{_name(feature, mm_index)} needs {num_embeds} embeddings, but the encoder cache "
                f"holds {limits.encoder_cache_size}: send a smaller one, or start with a larger "
                "encoder_cache_size"
            )
    if limits.is_encoder_decoder:
        _check_first_step(features, limits)
    else:
        _check_places(features, num_tokens)


def _check_first_step(features: Sequence[MultiModalFeatureSpec], limits: Limits) -> None:
    """Raise a `RequestError` if the items do not fit into the first step, which needs all of them.

    Items of an encoder-decoder model have no places of their own in the prompt.
    """
    for mm_index, feature in enumerate(features):
        if feature.mm_position.offset != 0:
            raise RequestError(
                f"{_name(feature, mm_index)} begins at {feature.mm_position.offset}: "
                "an encoder-decoder model has its items at 0"
            )
    num_embeds = sum({f.mm_hash: f.mm_position.get_num_embeds() for f in features}.values())
    if num_embeds > limits.encoder_cache_size:
        raise RequestError(
            f"the {len(features)} media items need {num_embeds} embeddings at once, but the "
            f"encoder cache holds {limits.encoder_cache_size}: send fewer, or start with a larger "
            "encoder_cache_size"
        )


def _check_places(features: Sequence[MultiModalFeatureSpec], num_tokens: int) -> None:
    previous_end = 0
    for mm_index, feature in enumerate(features):
        position = feature.mm_position
        if position.length == 0:
            raise RequestError(f"{_name(feature, mm_index)} takes no place in the prompt")
        if position.offset < previous_end:
            raise RequestError(
                f"{_name(feature, mm_index)} begins at {position.offset}, "
                f"before the item ahead of it ends ({previous_end})"
            )
        if position.end > num_tokens:
            raise RequestError(
                f"{_name(feature, mm_index)} ends at {position.end}, "
                f"beyond the prompt's {num_tokens} tokens"
            )
        previous_end = position.end


def _name(feature: MultiModalFeatureSpec, mm_index: int) -> str:
    return f"{feature.modality} item {mm_index}"


def get_unsplittable_spans(
    features: Sequence[MultiModalFeatureSpec], limits: Limits
) -> tuple[tuple[int, int], ...]:
    """Return the sorted ranges of positions that must be computed within one step."""
    if limits.is_encoder_decoder:
        return ()
    spans: tuple[tuple[int, int], ...] = ()
    if limits.bidirectional_modalities:
        spans = tuple(
            span
            for feature in features
            if feature.modality in limits.bidirectional_modalities
            for span in feature.mm_position.extract_embeds_range()
        )
        _check_apart(spans)
    if limits.disable_chunked_mm_input:
        spans = tuple((f.mm_position.offset, f.mm_position.end) for f in features)
    return spans


def _check_apart(spans: Iterable[tuple[int, int]]) -> None:
    for (_, end), (start, _) in pairwise(spans):
        if start == end:
            raise RequestError(
                f"two media items touch at position {start}: this model needs text between them"
            )
