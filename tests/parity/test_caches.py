"""Tokens are the same whatever the processor cache keeps, where it keeps it, and what it has lost.

Compared with an engine that caches nothing at all, which other tests compare with Transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from sensorium import LLM, RequestOutput, SamplingParams
from tests.parity.cases import (
    MAIN_MULTIMODAL_FAMILIES,
    MODALITIES,
    MULTIMODAL_FAMILIES,
    in_turns,
    make_audio,
    make_image,
    make_media,
    make_video,
)
from tests.support.engine import Trace, assert_nothing_is_left, get_token_ids, make_llm
from tests.support.media import make_clip, write_audio, write_image, write_video
from tests.unit.multimodal.cache.item_building import get_sent_sizes

NUM_TOKENS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
CACHE_TYPES = {"lru": "lru", "shm": "shm"}


TinyModel = Callable[[str], str]
Tokens = list[tuple[int, ...]]
ROOM_GB = 0.05
# A page, which is the least that shared memory comes in: less than any item of these has.
TINY_GB = 4096 / 2**30


def make_file(modality: str, *, seed: int) -> bytes:
    if modality == "image":
        return write_image(make_image(84, 84, seed=seed), "PNG")
    if modality == "video":
        return write_video(make_clip(4 + seed % 3, 84, 84))
    return write_audio(make_audio(1.2, seed=seed), "WAV", "PCM_16")


def make_conversation(*parts: Any) -> list[dict[str, Any]]:
    """Text, and pairs of a modality and an item."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": part[0], part[0]: part[1]}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@cache
def make_conversations(family: str) -> list[list[dict[str, Any]]]:
    """Each modality as a file and in process; one item twice, around another, if it may be."""
    conversations = []
    for modality in MODALITIES[family]:
        file = modality, make_file(modality, seed=80)
        conversations.append(make_conversation(file, "what is this?"))
        known = modality, make_media(modality, seed=81)
        conversations.append(make_conversation("look: ", known))
    file, known = ((modality, make_file(modality, seed=82)), known)
    if family != "audioflamingo3":  # which takes one audio item
        conversations.append(make_conversation(file, "and", known, "and", file, "again"))
    return conversations


def get_num_items(conversations: list[list[dict[str, Any]]]) -> tuple[int, int]:
    """Items, and how many of these are different from each other and from those before."""
    parts = [part for (message,) in conversations for part in message["content"]]
    media = [part[part["type"]] for part in parts if part["type"] != "text"]
    return len(media), len({id(item) for item in media})


def make_engine(directory: str, **options: Any) -> LLM:
    return make_llm(directory, max_model_len=2048, **options)


def run(llm: LLM, family: str) -> list[RequestOutput]:
    return llm.chat(make_conversations(family), GREEDY, use_tqdm=False)


def forget_outputs(llm: LLM) -> None:
    llm.core.scheduler.encoder_cache.clear_cache()
    llm.core.scheduler.kv_cache.clear_cache()


def get_hits(outputs: list[RequestOutput]) -> list[bool]:
    return [item.is_processor_hit for output in outputs for item in output.mm_items]


@pytest.fixture(scope="module")
def expected_of(tiny_model: TinyModel) -> Callable[[str], Tokens]:
    """The tokens of an engine that keeps nothing."""

    @cache
    def generate(family: str) -> Tokens:
        options = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False, "max_num_seqs": 1}
        llm = make_engine(tiny_model(family), **options)
        outputs = []
        for conversation in make_conversations(family):
            outputs += llm.chat(conversation, GREEDY, use_tqdm=False)
            forget_outputs(llm)
        assert not any(get_hits(outputs))
        return get_token_ids(outputs)

    return generate


@pytest.mark.parametrize(
    ("family", "cache_type"),
    in_turns(MULTIMODAL_FAMILIES, CACHE_TYPES, MAIN_MULTIMODAL_FAMILIES[1::2]),
)
def test_processed_items_that_are_used_again_change_nothing(
    tiny_model: TinyModel, expected_of: Callable[[str], Tokens], family: str, cache_type: str
) -> None:
    num_items, num_different = get_num_items(make_conversations(family))
    options = {"mm_processor_cache_type": cache_type, "mm_processor_cache_gb": ROOM_GB}
    with make_engine(tiny_model(family), **options) as llm:
        sender = llm.media_parts.caches.sender
        cold = run(llm, family)
        assert get_token_ids(cold) == expected_of(family)
        assert get_hits(cold).count(False) == num_different
        warm = run(llm, family)
        assert get_token_ids(warm) == expected_of(family)
        assert all(get_hits(warm))
        assert all(output.num_cached_tokens + output.num_encoder_hits for output in warm)
        forget_outputs(llm)
        trace = Trace(llm)
        again = run(llm, family)
        assert get_token_ids(again) == expected_of(family)
        assert all(get_hits(again))
        assert trace.num_encoded_items == num_different
        transfers = {item.transfer for output in again for item in output.mm_items}
        assert transfers == {"none" if cache_type == "lru" else "shared"}
        statistics = sender.statistics()
        assert statistics.num_queries == 3 * num_items
        assert statistics.num_hits == 3 * num_items - num_different
        assert (statistics.num_evictions, statistics.num_resends) == (0, 0)
        assert_nothing_is_left(llm)


@pytest.mark.parametrize(
    ("family", "cache_type"),
    in_turns(MULTIMODAL_FAMILIES, CACHE_TYPES, MAIN_MULTIMODAL_FAMILIES[1::2]),
)
def test_a_cache_that_is_smaller_than_an_item_changes_nothing(
    tiny_model: TinyModel, expected_of: Callable[[str], Tokens], family: str, cache_type: str
) -> None:
    num_items, _ = get_num_items(make_conversations(family))
    options = {"mm_processor_cache_type": cache_type, "mm_processor_cache_gb": TINY_GB}
    with make_engine(tiny_model(family), **options) as llm:
        outputs = run(llm, family)
        forget_outputs(llm)
        outputs += run(llm, family)
        assert get_token_ids(outputs) == expected_of(family) * 2
        statistics = llm.media_parts.caches.sender.statistics()
        assert (statistics.num_items, statistics.num_bytes) == (0, 0)
        assert statistics.num_oversize > num_items
        assert_nothing_is_left(llm)


@pytest.mark.parametrize(
    ("family", "cache_type"),
    in_turns(MULTIMODAL_FAMILIES, CACHE_TYPES, MAIN_MULTIMODAL_FAMILIES[::2]),
)
def test_evictions_change_nothing(
    tiny_model: TinyModel, expected_of: Callable[[str], Tokens], family: str, cache_type: str
) -> None:
    """Room for the larger item, and hardly more: each conversation drives out the one before."""
    conversations = make_conversations(family)[:2]
    probe = make_engine(tiny_model(family), mm_processor_cache_gb=ROOM_GB)
    probe.chat(conversations, SamplingParams(max_tokens=1), use_tqdm=False)
    sizes = get_sent_sizes(probe.media_parts.caches.sender).values()  # type: ignore[arg-type]
    options = {
        "mm_processor_cache_type": cache_type,
        "mm_processor_cache_gb": (max(sizes) + 8192) / 2**30,
    }
    with make_engine(tiny_model(family), **options) as llm:
        for _ in range(2):
            for conversation, tokens in zip(conversations, expected_of(family)[:2], strict=True):
                forget_outputs(llm)
                (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
                assert output.outputs[0].token_ids == tokens
        statistics = llm.media_parts.caches.sender.statistics()
        assert statistics.num_evictions == 3
        assert statistics.num_bytes <= statistics.capacity_bytes
        assert_nothing_is_left(llm)


@pytest.mark.parametrize(("family", "cache_type"), [("qwen2_5_omni", "shm")])
def test_processes_that_process_change_nothing(
    tiny_model: TinyModel, expected_of: Callable[[str], Tokens], family: str, cache_type: str
) -> None:
    options = {"mm_processor_cache_type": cache_type, "mm_processor_cache_gb": ROOM_GB}
    with make_engine(tiny_model(family), mm_processor_pool_size=1, **options) as llm:
        num_items, num_different = get_num_items(make_conversations(family))
        assert get_token_ids(run(llm, family)) == expected_of(family)
        forget_outputs(llm)
        assert get_token_ids(run(llm, family)) == expected_of(family)
        assert llm.media_parts.pool is not None
        assert llm.media_parts.pool.statistics().num_done == num_different
        statistics = llm.media_parts.caches.sender.statistics()
        assert statistics.num_queries == 2 * num_items
        assert statistics.num_hits == 2 * num_items - num_different


def test_media_of_these_tests_differ() -> None:
    """Tokens that depend on nothing would also be equal."""
    video = make_video(4, 84, 84, seed=81)
    assert (video != make_video(4, 84, 84, seed=82)).any()
    for family in MULTIMODAL_FAMILIES:
        num_items, num_different = get_num_items(make_conversations(family))
        assert num_different >= 2
        assert num_items >= num_different
