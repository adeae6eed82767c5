"""Checks requests before the core accepts them, so that no accepted request can get stuck.

The functions have no state: they read a request and the limits, and raise `RequestError`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.request import Spans
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalFeatureSpec
from sensorium.types.request import EngineCoreRequest

_MEDIA = ("multi_modal_data",)  # the path of a prompt's media items


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits on requests and steps, and the properties of the model that affect scheduling."""

    max_model_len: int  # tokens, as all lengths
    max_num_batched_tokens: int
    max_num_seqs: int
    encoder_cache_size: int  # in embeddings
    max_num_encoder_embeds: int  # embeddings that one step may compute
    # The model attends in both directions inside items of these modalities, so that consecutive
    # embeddings of an item must be computed in one step.
    bidirectional_modalities: frozenset[str] = frozenset()
    disable_chunked_mm_input: bool = False  # every item is computed in one step, for any model
    is_encoder_decoder: bool = False
    # A request with more tokens than this is computed with other rotary factors, so a request that
    # grows longer is computed again from its start. None: the length makes no difference.
    long_after: int | None = None
    # A prompt is long if more tokens than this are to be computed when its request starts. While
    # other requests wait for their first token, long prompts together get at most this many tokens
    # of a step. 0: no prompt is long.
    long_prefill_token_threshold: int = 0
    # While other requests run, how many steps without long prompts follow one with their tokens.
    long_prefill_pause: int = 0


def check_request(request: EngineCoreRequest, limits: Limits) -> None:
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        raise RequestError("the prompt is empty: at least one token is needed", path=("prompt",))
    check_length(num_tokens, limits.max_model_len)
    stream = request.stream
    if stream is None:  # the audio of a stream has no placeholder in its prompt
        _check_features(request.mm_features, num_tokens, limits)
    elif not stream.is_open and stream.num_received <= num_tokens:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, but every token needs a part of the audio, which "
            f"is long enough for {stream.num_received}: shorten the prompt, or send longer audio",
            path=("prompt",),
        )


def check_length(num_tokens: int, max_model_len: int) -> None:
    if num_tokens >= max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, but the context holds {max_model_len} "
            "and needs room for at least one new token: shorten the prompt",
            path=("prompt",),
        )


def get_max_tokens(request: EngineCoreRequest, limits: Limits) -> int:
    """Return how many tokens a request can have at most, prompt and output together."""
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is None:
        return limits.max_model_len
    return min(len(request.prompt_token_ids) + max_tokens, limits.max_model_len)


def check_growth(
    request: EngineCoreRequest, limits: Limits, spans: Spans, kv_cache: KVCacheManager
) -> None:
    """Raise `RequestError` if a request at its full length does not fit into an empty KV cache."""
    longest_span = max((end - start for start, end in spans), default=0)
    max_new_tokens = max(limits.max_num_batched_tokens, longest_span)
    max_tokens = get_max_tokens(request, limits)
    num_cross = 0
    if limits.is_encoder_decoder:
        num_cross = sum(feature.mm_position.get_num_embeds() for feature in request.mm_features)
    if kv_cache.can_ever_fit(max_tokens, max_new_tokens, num_cross):
        return
    num_needed = len(request.prompt_token_ids) + 1
    if kv_cache.can_ever_fit(num_needed, max_new_tokens) and not kv_cache.can_ever_fit(
        num_needed, max_new_tokens, num_cross
    ):
        raise RequestError(
            f"the media need {num_cross} positions, more than the KV cache holds: send fewer or "
            "shorter ones, or start the engine with a larger kv_cache_memory_bytes",
            path=_MEDIA,
        )
    is_too_long = not kv_cache.can_ever_fit(num_needed, max_new_tokens)
    raise RequestError(
        f"the request may grow to {max_tokens} tokens, more than the whole KV cache holds: "
        "ask for fewer max_tokens, or start the engine with a larger kv_cache_memory_bytes",
        path=("prompt" if is_too_long else "max_tokens",),
    )


def _check_features(
    features: Sequence[MultiModalFeatureSpec], num_tokens: int, limits: Limits
) -> None:
    for mm_index, feature in enumerate(features):
        num_embeds = feature.mm_position.get_num_embeds()
        if num_embeds > limits.encoder_cache_size:
            raise _make_error(
                features,
                mm_index,
                f"needs {num_embeds} embeddings, but the encoder cache holds "
                f"{limits.encoder_cache_size}: send a smaller one, or start the engine with "
                "a larger encoder_cache_size",
            )
    if limits.is_encoder_decoder:
        _check_first_step(features, limits)
    else:
        _check_places(features, num_tokens)


def _check_first_step(features: Sequence[MultiModalFeatureSpec], limits: Limits) -> None:
    """Raise `RequestError` if an encoder-decoder model can't encode all items in the first step."""
    # These items take no positions in the prompt.
    for mm_index, feature in enumerate(features):
        offset = feature.mm_position.offset
        if offset != 0:
            reason = f"begins at token {offset}: an encoder-decoder model needs all media at 0"
            raise _make_error(features, mm_index, reason)
    num_embeds = sum({f.mm_hash: f.mm_position.get_num_embeds() for f in features}.values())
    if num_embeds > limits.encoder_cache_size:
        raise RequestError(
            f"the {len(features)} media items need {num_embeds} embeddings at once, but the "
            f"encoder cache holds {limits.encoder_cache_size}: send fewer, or start the engine "
            "with a larger encoder_cache_size",
            path=_MEDIA,
        )


def _check_places(features: Sequence[MultiModalFeatureSpec], num_tokens: int) -> None:
    previous_end = 0
    for mm_index, feature in enumerate(features):
        position = feature.mm_position
        reason = None
        if position.length == 0:
            reason = "has no placeholder tokens in the prompt: it needs at least one"
        elif position.offset < previous_end:
            reason = (
                f"begins at token {position.offset}, but the previous item ends at {previous_end}"
            )
        elif position.end > num_tokens:
            reason = f"ends at token {position.end}, but the prompt has only {num_tokens} tokens"
        if reason is not None:
            raise _make_error(features, mm_index, reason)
        previous_end = position.end


def _make_error(
    features: Sequence[MultiModalFeatureSpec], mm_index: int, reason: str
) -> RequestError:
    """Return the error "<modality> item <index> <reason>"; `reason` begins with a verb."""
    modality = features[mm_index].modality
    index = sum(feature.modality == modality for feature in features[:mm_index])
    return RequestError(f"{modality} item {index} {reason}", path=(*_MEDIA, modality, index))


def get_unsplittable_spans(features: Sequence[MultiModalFeatureSpec], limits: Limits) -> Spans:
    """Return the sorted token ranges of media items that must each be computed in one step.

    Raise `RequestError` if no text separates two items with bidirectional attention.
    """
    if limits.is_encoder_decoder:
        return ()
    spans = tuple(
        span
        for feature in features
        if feature.modality in limits.bidirectional_modalities
        for span in feature.mm_position.extract_embeds_range()
    )
    for (_, end), (start, _) in pairwise(spans):
        if start == end:
            raise RequestError(
                f"two media items meet at token {start}: put text between them for this model",
                path=("prompt",),
            )
    if limits.disable_chunked_mm_input:
        spans = tuple((f.mm_position.offset, f.mm_position.end) for f in features)
    return spans
