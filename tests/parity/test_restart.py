"""An engine that starts again with a tier: the same tokens, and nothing is encoded again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sensorium import LLM, SamplingParams
from sensorium.engine.speech.models import WhisperModel
from tests.parity.cases import MULTIMODAL_FAMILIES
from tests.parity.reference import NUM_TOKENS, Reference, ReferenceOf
from tests.support.engine import get_token_ids, make_llm
from tests.support.media import make_melody
from tests.support.redis_server import run_redis

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# A grid, DeepStack and video; one tensor only; audio. The others are alike for this.
CHOSEN = ("qwen3_vl", "llava", "qwen2_5_omni")
FAMILIES = [
    pytest.param(family, marks=() if family in CHOSEN else pytest.mark.slow)
    for family in MULTIMODAL_FAMILIES
]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_after_a_restart_without_an_encoder(
    family: str, tiny_model: Callable[[str], str], reference_of: ReferenceOf, tmp_path: Path
) -> None:
    check_restarts(tiny_model(family), reference_of(family), mm_disk_cache=tmp_path)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family == "qwen3_vl" else pytest.mark.slow)
        for family in MULTIMODAL_FAMILIES
    ],
)
def test_the_same_tokens_after_a_restart_with_only_a_redis(
    family: str, tiny_model: Callable[[str], str], reference_of: ReferenceOf
) -> None:
    with run_redis() as redis:
        check_restarts(tiny_model(family), reference_of(family), mm_remote_cache=redis.url)


def check_restarts(directory: str, reference: Reference, **tier: Any) -> None:
    """Compare the tokens of three engines, one after another, with those of Transformers."""
    expected = reference.expected
    counts = []
    for cache_type in ("lru", "shm", "lru"):
        options = {"mm_processor_cache_type": cache_type, "mm_processor_cache_gb": 0.1}
        with make_llm(directory, **tier, **options) as llm:
            outputs = llm.generate([each.prompt for each in expected], GREEDY, use_tqdm=False)
            runner = llm.core.runner.encoder_runner
        stages = {stage for output in outputs for item in output.mm_items for stage in item.times}
        assert [list(ids) for ids in get_token_ids(outputs)] == [e.token_ids for e in expected]
        counts.append((runner.num_encoded, runner.num_loaded))
        assert ("process" in stages) == (len(counts) == 1)
        assert "load" in stages
    num_encoded, num_loaded = counts[0]
    assert num_encoded > 0
    assert num_loaded == 0
    assert counts[1:] == [(0, num_encoded)] * 2


@pytest.mark.parametrize("family", ["whisper", pytest.param("moonshine", marks=pytest.mark.slow)])
def test_a_cached_recording_is_transcribed_without_its_encoder(
    family: str, tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    check_transcripts(tiny_model(family), mm_disk_cache=tmp_path)


def test_a_recording_that_only_a_redis_has_is_transcribed_without_its_encoder(
    tiny_model: Callable[[str], str],
) -> None:
    with run_redis() as redis:
        check_transcripts(tiny_model("whisper"), mm_remote_cache=redis.url)


def check_transcripts(directory: str, **tier: Any) -> None:
    """Compare the transcripts of two engines, one after another."""
    audio, found = make_melody(16_000 * 3), []
    for _ in range(2):
        with LLM(directory, dtype="float32", **tier) as llm:
            if isinstance(llm._speech, WhisperModel):  # a random model would try all temperatures
                settings = replace(llm._speech.settings, temperatures=(0.0,), max_new_tokens=8)
                llm._speech = replace(llm._speech, settings=settings)
            (transcript,) = llm.transcribe([(audio, 16_000)], use_tqdm=False)
            runner = llm.core.runner.encoder_runner
            found.append((transcript.text, runner.num_encoded, runner.num_loaded))
    (text, num_encoded, _), (again, *counts) = found
    assert again == text
    assert num_encoded > 0
    assert counts == [0, num_encoded]
