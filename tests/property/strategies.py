"""Requests, limits and caches for the state machines: small, so that they collide and run out.

A media item's layout follows from its hash, as it does in the engine; prompts come from so small
an alphabet that requests often begin alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from sensorium.core.admission import Limits
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import KVCacheGroup

PLACEHOLDER = 9
EOS = 3
REQUEST_IDS = tuple(f"r{n}" for n in range(8))
MAX_MODEL_LEN = 40

T, F = True, False
# mm_hash → (length, is_embed)
LAYOUTS: dict[str, tuple[int, tuple[bool, ...] | None]] = {
    "one": (1, None),
    "two": (2, None),
    "three": (3, None),
    "rows": (5, (T, T, F, T, T)),
    "framed": (4, (F, T, T, F)),
    "six": (6, None),
    "nine": (9, None),
    "mute": (2, (F, F)),
    "empty": (2, ()),
}

texts = st.lists(st.sampled_from((1, 2)), min_size=1, max_size=5).map(tuple)
items = st.sampled_from(sorted(LAYOUTS))
segments = st.one_of(texts, texts, items)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Everything that a scheduler is built from, but the limits."""

    block_size: int
    groups: tuple[KVCacheGroup, ...]
    enable_prefix_caching: bool = True


def make_request(
    request_id: str,
    *parts: str | tuple[int, ...],
    cache_salt: str | None = None,
    adapter: str | None = None,
    priority: int = 0,
    sampling_params: SamplingParams | None = None,
    is_encoder_decoder: bool = False,
) -> EngineCoreRequest:
    """A request whose prompt is made of `parts`: an item by its hash, or tokens."""
    token_ids: list[int] = []
    features = []
    for part in parts:
        if not isinstance(part, str):
            token_ids.extend(part)
            continue
        length, is_embed = LAYOUTS[part]
        offset = 0 if is_encoder_decoder else len(token_ids)
        position = PlaceholderRange(offset, length, is_embed)
        features.append(MultiModalFeatureSpec(modality="image", mm_hash=part, mm_position=position))
        if not is_encoder_decoder:
            token_ids.extend([PLACEHOLDER] * length)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tuple(token_ids),
        sampling_params=sampling_params or SamplingParams(max_tokens=4),
        mm_features=tuple(features),
        eos_token_ids=(EOS,),
        cache_salt=cache_salt,
        adapter=adapter,
        priority=priority,
    )


@st.composite
def core_requests(
    draw: st.DrawFn,
    *,
    request_ids: st.SearchStrategy[str] | None = None,
    is_encoder_decoder: bool = False,
) -> EngineCoreRequest:
    return make_request(
        draw(request_ids or st.sampled_from(REQUEST_IDS)),
        *draw(st.lists(segments, min_size=1, max_size=5)),
        cache_salt=draw(st.sampled_from((None, None, None, "salt"))),
        adapter=draw(st.sampled_from((None, None, None, "adapter"))),
        priority=draw(st.integers(0, 2)),
        sampling_params=draw(sampling_params()),
        is_encoder_decoder=is_encoder_decoder,
    )


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.one_of(st.integers(1, 8), st.none()))
    return SamplingParams(max_tokens=max_tokens, ignore_eos=draw(st.booleans()))


@st.composite
def cache_sizes(draw: st.DrawFn, *, max_num_blocks: int = 24) -> CacheSizes:
    windows = draw(st.lists(st.sampled_from((None, 2, 3, 5)), min_size=1, max_size=3))
    groups = tuple(
        KVCacheGroup(num_blocks=draw(st.integers(8, max_num_blocks)), window=window)
        for window in windows
    )
    return CacheSizes(
        block_size=draw(st.integers(1, 4)),
        groups=groups,
        enable_prefix_caching=draw(st.sampled_from((True, True, True, False))),
    )


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    plain = Limits(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=draw(st.integers(1, 12)),
        max_num_seqs=draw(st.integers(1, 4)),
        encoder_cache_size=draw(st.integers(4, 12)),
        max_num_encoder_embeds=draw(st.integers(1, 12)),
    )
    variants = (
        plain,
        plain,
        replace(plain, needs_whole_spans=True),
        replace(plain, disable_chunked_mm_input=True),
        replace(plain, needs_whole_spans=True, disable_chunked_mm_input=True),
        replace(plain, is_encoder_decoder=True),
    )
    return draw(st.sampled_from(variants))
