"""Speech models: the tokens of Transformers, however requests are batched, cached and preempted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.request import Request
from sensorium.worker.input_batch import InputBatch
from tests.parity.cases import make_audio
from tests.parity.graph_parts import use_graphs
from tests.parity.speaking import (
    FAMILIES,
    NUM_TOKENS,
    SpeechReference,
    get_wrong,
    make_engine,
    run,
)
from tests.support.engine import Trace, assert_nothing_is_left

BUDGETS = (7, 24, 4096)  # tokens of a step

TinyModel = Callable[[str], str]
ReferenceOf = Callable[[str], SpeechReference]


@pytest.fixture(scope="session")
def reference_of(tiny_model: TinyModel) -> ReferenceOf:
    known: dict[str, SpeechReference] = {}

    def get(family: str) -> SpeechReference:
        if family not in known:
            known[family] = SpeechReference(family, tiny_model(family))
        return known[family]

    return get


def test_the_reference_is_sensitive(reference_of: ReferenceOf) -> None:
    """Recordings have different answers, so that a request with another's audio would be seen."""
    for family in FAMILIES:
        answers = [tuple(entry.token_ids) for entry in reference_of(family).spoken]
        assert len(set(answers)) >= len(answers) - 1


@pytest.mark.check("alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_one_at_a_time_give_the_reference_tokens(
    family: str, reference_of: ReferenceOf
) -> None:
    reference = reference_of(family)
    llm = make_engine(reference.directory, max_num_seqs=1)
    assert get_wrong(run(llm, reference.spoken), reference.spoken) == []
    assert_nothing_is_left(llm)


@pytest.mark.check("budgets")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_requests_with_different_ends_give_the_reference_tokens(
    family: str, budget: int, reference_of: ReferenceOf
) -> None:
    reference = reference_of(family)
    spoken = [
        replace(entry, token_ids=entry.token_ids[: NUM_TOKENS - 2 * number])
        for number, entry in enumerate(reference.spoken)
    ]
    llm = make_engine(reference.directory, max_num_batched_tokens=budget, max_num_seqs=8)
    trace = Trace(llm)
    assert get_wrong(run(llm, spoken), spoken) == []
    # In small steps, the encoder pauses after each recording, so that decodes need not wait.
    assert trace.most_requests_in_a_step > {7: 0, 24: 2, 4096: 4}[budget]
    assert_nothing_is_left(llm)


@pytest.mark.check("encoder cache")
@pytest.mark.parametrize("family", FAMILIES)
def test_audio_that_was_encoded_before_gives_the_reference_tokens(
    family: str, reference_of: ReferenceOf
) -> None:
    reference = reference_of(family)
    llm = make_engine(reference.directory)
    run(llm, reference.spoken)
    trace = Trace(llm)
    outputs = run(llm, reference.spoken)
    assert get_wrong(outputs, reference.spoken) == []
    assert trace.num_encoded_items == 0
    assert all(output.num_encoder_hits == 1 for output in outputs)


@pytest.mark.check("preemption")
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_give_the_reference_tokens(
    family: str, reference_of: ReferenceOf
) -> None:
    """The keys and values of the audio are computed again, and so are those of its tokens."""
    reference = reference_of(family)
    llm = make_engine(reference.directory, block_size=8, max_num_seqs=8)
    trace = Trace(llm)
    (pool,) = [
        pool
        for pool, group in zip(
            llm.core.scheduler.kv_cache._pools, llm.core.scheduler.kv_cache.groups, strict=True
        )
        if not group.is_cross
    ]
    held = pool.allocate(pool.num_free - 14)
    assert get_wrong(run(llm, reference.spoken), reference.spoken) == []
    assert trace.num_preemptions > 0
    pool.release(held)
    assert_nothing_is_left(llm)


@pytest.mark.check("graphs")
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_give_the_reference_tokens(
    family: str, reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_of(family)
    recorders = use_graphs(monkeypatch)
    llm = make_engine(reference.directory, max_num_seqs=8)
    assert get_wrong(run(llm, reference.spoken), reference.spoken) == []
    assert recorders.decoding.num_replays > NUM_TOKENS / 2


def test_equal_prompts_over_different_recordings_share_nothing(reference_of: ReferenceOf) -> None:
    """Prompts of whole blocks, which a decoder alone would take from its prefix cache."""
    reference = reference_of("whisper")
    long = "<|startofprev|>" + " the quick brown fox jumps over the lazy dog." * 2
    text = f"{long}<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    spoken = [reference.ask(make_audio(2.0, seed=50 + number), text) for number in range(3)]
    assert len({tuple(entry.token_ids) for entry in spoken}) == 3
    assert len(spoken[0].prompt_token_ids) > 2 * 8
    llm = make_engine(reference.directory, block_size=8)
    for entry in [*spoken, *spoken]:
        outputs = run(llm, [entry])
        assert get_wrong(outputs, [entry]) == []
        assert outputs[0].num_cached_tokens == 0


def test_block_hashes_carry_the_audio(
    reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal tokens have equal hashes if their audio is equal, and other hashes if it is not."""
    reference = reference_of("whisper")
    hashes: list[list[bytes]] = []
    commit = KVCacheManager.commit

    def note(self: KVCacheManager, request: Request) -> None:
        commit(self, request)
        hashes.append([request.block_hash(0)])

    monkeypatch.setattr(KVCacheManager, "commit", note)
    llm = make_engine(reference.directory, block_size=8)
    text = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|> hello world hello world"
    for seed in (1, 2, 1):
        run(llm, [replace(reference.ask(make_audio(1.0, seed=seed), text), token_ids=[0])])
    first, second, third = (set(entry) for entry in hashes[:3])
    assert first
    assert first & third
    assert not first & second


# ---- deliberate mistakes, which must be seen


def _hear_another_audio(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = InputBatch._gather_new_audios

    def roll(self: InputBatch, rows: Any) -> list[torch.Tensor]:
        return [audio.roll(1, -1) for audio in gather(self, rows)]

    monkeypatch.setattr(InputBatch, "_gather_new_audios", roll)


def _hear_less(monkeypatch: pytest.MonkeyPatch) -> None:
    make_tables = InputBatch._make_cross_tables

    def cut(self: InputBatch, *arguments: Any) -> Any:
        tables = make_tables(self, *arguments)
        rows = [replace(row, num_positions=row.num_positions // 2) for row in tables.rows]
        return replace(tables, rows=rows)

    monkeypatch.setattr(InputBatch, "_make_cross_tables", cut)


@pytest.mark.check("controls")
@pytest.mark.parametrize("mistake", [_hear_another_audio, _hear_less])
@pytest.mark.parametrize("family", FAMILIES)
def test_mistakes_are_seen(
    family: str,
    mistake: Callable[[pytest.MonkeyPatch], None],
    reference_of: ReferenceOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = reference_of(family)
    mistake(monkeypatch)
    assert get_wrong(run(make_engine(reference.directory), reference.spoken), reference.spoken)
