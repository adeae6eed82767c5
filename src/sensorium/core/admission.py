"""What a request must satisfy before the core accepts it, so that no accepted one can get stuck.

Pure: it looks at a request and the limits, and raises a `RequestError` that names what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalFeatureSpec
from sensorium.types.request import EngineCoreRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a step, and what the model asks of it.

    `needs_whole_spans`: the model attends in both directions inside an item, so that its embeddings
    run in one step.
    `disable_chunked_mm_input`: items run whole although the model would not need it.
    """

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    encoder_cache_size: int
    max_num_encoder_embeds: int
    needs_whole_spans: bool = False
    disable_chunked_mm_input: bool = False
    is_encoder_decoder: bool = False


def check_request(request: EngineCoreRequest, limits: Limits) -> None:
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        raise RequestError("the prompt is empty: at least one token is needed")
    if num_tokens >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, but the context holds {limits.max_model_len} "
            "and needs room for at least one new token"
        )
    _check_features(request.mm_features, num_tokens, limits)


def get_max_tokens(request: EngineCoreRequest, limits: Limits) -> int:
    """How many tokens the request can have at most, prompt and output together."""
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is None:
        return limits.max_model_len
    return min(len(request.prompt_token_ids) + max_tokens, limits.max_model_len)


def _check_features(
    features: Iterable[MultiModalFeatureSpec], num_tokens: int, limits: Limits
) -> None:
    previous_end = 0
    for mm_index, feature in enumerate(features):
        position = feature.mm_position
        name = f"{feature.modality} item {mm_index}"
        num_embeds = position.get_num_embeds()
        if num_embeds > limits.encoder_cache_size:
            raise RequestError(
                f"{name} needs {num_embeds} embeddings, but the encoder cache holds "
                f"{limits.encoder_cache_size}: send a smaller one, or start with a larger "
                "encoder_cache_size"
            )
        if limits.is_encoder_decoder:
            continue
        if position.length == 0:
            raise RequestError(f"{name} takes no place in the prompt")
        if position.offset < previous_end:
            raise RequestError(
                f"{name} begins at {position.offset}, before the item ahead of it ends "
                f"({previous_end})"
            )
        if position.end > num_tokens:
            raise RequestError(
                f"{name} ends at {position.end}, beyond the prompt's {num_tokens} tokens"
            )
        previous_end = position.end


def get_unsplittable_spans(
    features: Iterable[MultiModalFeatureSpec], limits: Limits
) -> tuple[tuple[int, int], ...]:
    """Ranges of positions that must be computed within one step, sorted."""
    if limits.is_encoder_decoder:
        return ()
    if limits.disable_chunked_mm_input:
        return tuple((f.mm_position.offset, f.mm_position.end) for f in features)
    if not limits.needs_whole_spans:
        return ()
    spans = tuple(span for f in features for span in f.mm_position.extract_embeds_range())
    for (_, end), (start, _) in pairwise(spans):
        if start == end:
            raise RequestError(
                f"two media items touch at position {start}: this model needs text between them"
            )
    return spans
