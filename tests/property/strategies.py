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

# What requests begin with, so that they often begin alike.
Part = str | tuple[int, ...]
DOCUMENTS: tuple[tuple[Part, ...], ...] = (
    ((1, 1, 1), "three", (2, 2), "rows", (1, 2, 1, 2)),
    ((1, 1, 1), "six", (1, 1), "six", (2,)),
    ("framed", (1,), "two", (1,), "two", (1, 1, 1)),
    ((1,) * 9, (2,) * 9),
    ((PLACEHOLDER,), "two", (1, 1, 1)),
    ("two", (PLACEHOLDER,), (1, 1, 1)),
)

# A text may also contain the placeholder's token.
texts = st.builds(
    lambda token_id, length: (token_id,) * length,
    st.sampled_from((1, 1, 2, PLACEHOLDER)),
    st.integers(1, 6),
)
items = st.sampled_from(sorted(LAYOUTS))
parts = st.one_of(texts, items)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Everything that a scheduler is built from, but the limits."""

    block_size: int
    groups: tuple[KVCacheGroup, ...]
    enable_prefix_caching: bool = True


def make_request(
    request_id: str,
    *parts: Part,
    cache_salt: str | None = None,
    lora_id: str | None = None,
    priority: int = 0,
    group: str | None = None,
    sampling_params: SamplingParams | None = None,
    is_encoder_decoder: bool = False,
) -> EngineCoreRequest:
    """Return a request with a prompt of `parts`: an item by its hash, or tokens."""
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
        lora_id=lora_id,
        priority=priority,
        group=group,
    )


@st.composite
def core_requests(
    draw: st.DrawFn,
    *,
    request_ids: st.SearchStrategy[str] = st.sampled_from(REQUEST_IDS),  # noqa: B008
    is_encoder_decoder: bool = False,
    groups: tuple[str | None, ...] = (None,),
) -> EngineCoreRequest:
    return make_request(
        draw(request_ids),
        *draw(st.sampled_from(DOCUMENTS))[: draw(st.integers(0, 5))],
        *draw(st.lists(parts, min_size=1, max_size=5)),
        *(((1,),) if is_encoder_decoder else ()),
        cache_salt=draw(st.sampled_from((None, None, None, "salt"))),
        lora_id=draw(st.sampled_from((None, None, None, "adapter"))),
        priority=draw(st.integers(0, 2)),
        group=draw(st.sampled_from(groups)),
        sampling_params=draw(sampling_params()),
        is_encoder_decoder=is_encoder_decoder,
    )


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.sampled_from((1, 2, 4, 8, 12, None)))
    return SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=draw(st.booleans()),
        prompt_logprobs=draw(st.sampled_from((None, None, None, 0))),
        # With a penalty each token must be known before the next one can be chosen.
        presence_penalty=draw(st.sampled_from((0.0, 0.0, 0.0, 0.5))),
    )


@st.composite
def cache_sizes(draw: st.DrawFn) -> CacheSizes:
    """Room for the longest request, or almost, and not much more; with a window, even less."""
    block_size = draw(st.integers(1, 4))
    windows = draw(st.sampled_from(((None,), (None,), (None, 3), (None, 2, 5), (5,), (3, None))))
    groups = []
    for window in windows:
        num_tokens = draw(st.sampled_from((30, 40, 44, 60) if window is None else (12, 20, 40)))
        groups.append(KVCacheGroup(num_blocks=1 + num_tokens // block_size, window=window))
    return CacheSizes(
        block_size=block_size,
        groups=tuple(groups),
        enable_prefix_caching=draw(st.sampled_from((True, True, True, False))),
    )


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    plain = Limits(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=draw(st.integers(2, 12)),
        max_num_seqs=draw(st.integers(1, 5)),
        encoder_cache_size=draw(st.sampled_from((4, 6, 9, 12))),
        max_num_encoder_embeds=draw(st.sampled_from((1, 4, 9))),
    )
    variants = (
        plain,
        replace(plain, bidirectional_modalities=frozenset({"image"})),
        replace(plain, disable_chunked_mm_input=True),
        replace(
            plain, bidirectional_modalities=frozenset({"image"}), disable_chunked_mm_input=True
        ),
        replace(plain, is_encoder_decoder=True),
    )
    return replace(
        draw(st.sampled_from(variants)),
        long_after=draw(st.sampled_from((None, None, 5, 12, 20))),
        long_prefill_token_threshold=draw(st.sampled_from((0, 1, 2, 4, 8, 16))),
        long_prefill_pause=draw(st.sampled_from((0, 0, 1, 3))),
    )
