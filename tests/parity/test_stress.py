"""Random requests on random engines give the tokens of `generate`, and leave nothing behind.

A failure names its seed and its engine; another seed is one more value of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import sensorium.core.request as core_request
from sensorium.core.block_pool import BlockPool
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.request import Request
from sensorium.types.errors import InvariantError
from sensorium.worker.request_states import RequestState
from tests.parity.cases import MAIN_FAMILIES, MODALITIES, every_fourth
from tests.parity.reference import ReferenceOf
from tests.parity.stress import MAX_NEW_TOKENS, NUM_ENGINES, NUM_REQUESTS, Stress, Tally
from tiny_models.text import PHI3_BORDER

pytestmark = pytest.mark.check("stress")

SEED = 0


# Each has a close relative that is stressed in every run.
LONGER = (
    *("gemma3", "idefics3", "llava_onevision", "qwen2_audio", "qwen2_vl", "qwen2_5_vl", "smolvlm"),
    "voxtral",
)


def has_seen_all(tally: Tally, family: str) -> bool:
    """Return whether all has happened that the tokens might depend on."""
    counts = [
        tally.num_preemptions,
        tally.num_prefix_hits,
        tally.num_aborted_running,
        tally.num_aborted_waiting,
    ]
    if MODALITIES[family]:
        counts += [tally.num_encoder_hits, tally.num_encoder_evictions]
    return all(counts)


@pytest.mark.parametrize("family", every_fourth([f for f in MAIN_FAMILIES if f not in LONGER], 0))
def test_some_random_requests_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str
) -> None:
    """Two engines run at least, and as many as it takes to see all that may happen."""
    tally = Tally()
    for engine in Stress(reference_of(family), SEED).run_engines():
        tally.add(engine)
        assert tally.differences == []
        if tally.num_engines >= 2 and has_seen_all(tally, family):
            break
    assert has_seen_all(tally, family), tally
    assert tally.num_compared >= NUM_REQUESTS // 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("family", MAIN_FAMILIES)
def test_random_requests_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str, seed: int
) -> None:
    """On four engines, and four more with other requests if those have not seen all."""
    total = Tally()
    for each in (seed, seed + 1):
        stress = Stress(reference_of(family), each)
        tally = stress.run()
        assert tally.differences == []
        assert set(tally.compared_names) == {entry.case.name for entry in stress.expected}
        assert tally.num_engines == NUM_ENGINES
        assert len(stress.expected) == NUM_REQUESTS
        total.add(tally)
        if has_seen_all(total, family):
            break
    assert has_seen_all(total, family), total


@pytest.mark.slow
def test_hundreds_of_requests_around_the_border_of_rotary_factors(
    reference_of: ReferenceOf,
) -> None:
    """Mixed lengths: many of them cross the border in a batch with others."""
    num_compared = num_crossing = 0
    for seed in range(1, 11):
        stress = Stress(reference_of("phi3"), seed)
        tally = stress.run()
        assert tally.differences == []
        num_compared += tally.num_compared
        lengths = [len(entry.prompt_token_ids) for entry in stress.expected]
        num_crossing += sum(
            length <= PHI3_BORDER < length + MAX_NEW_TOKENS - 1 for length in lengths
        )
    assert num_compared >= 300
    assert num_crossing >= 30


def confuse_encoder_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (Request, RequestState):
        monkeypatch.setattr(owner, "get_encoder_key", lambda *_: "the only key")


def forget_media_in_block_names(monkeypatch: pytest.MonkeyPatch) -> None:
    hash_block = core_request.hash_block
    monkeypatch.setattr(
        core_request, "hash_block", lambda parent, token_ids, _: hash_block(parent, token_ids, ())
    )


def keep_names_of_evicted_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate_one(pool: Any) -> int:
        block_id: int = pool._free.popitem(last=False)[0]
        pool._num_refs[block_id] = 1
        return block_id

    monkeypatch.setattr(BlockPool, "_allocate_one", allocate_one)


def give_a_block_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a request gets a block that the one before it got."""
    extend = KVCacheManager._extend
    given_by: dict[KVCacheManager, list[int]] = {}

    def extend_wrongly(manager: KVCacheManager, tables: Any, counts: Any) -> Any:
        new_ids = extend(manager, tables, counts)
        if not new_ids[0]:
            return new_ids
        given = given_by.setdefault(manager, [])
        given.append(new_ids[0][0])
        if len(given) % 10 != 0 or given[-1] == given[-2]:
            return new_ids
        manager._pools[0].release([given[-1]])
        manager._pools[0].acquire(given[-2])
        tables[0].block_ids[-len(new_ids[0])] = given[-2]
        return ((given[-2], *new_ids[0][1:]), *new_ids[1:])

    monkeypatch.setattr(KVCacheManager, "_extend", extend_wrongly)


@pytest.mark.parametrize(
    "break_engine",
    [
        confuse_encoder_outputs,
        forget_media_in_block_names,
        keep_names_of_evicted_blocks,
        give_a_block_twice,
    ],
)
def test_a_mistake_is_seen(
    reference_of: ReferenceOf,
    monkeypatch: pytest.MonkeyPatch,
    break_engine: Callable[[pytest.MonkeyPatch], None],
) -> None:
    # Its pictures have equally many embeddings: what is confused fits, and only tokens tell.
    stress = Stress(reference_of("llava"), SEED)
    break_engine(monkeypatch)
    assert any(tally.differences for tally in stress.run_engines())


@pytest.mark.parametrize("owner", [KVCacheManager, EncoderCacheManager])
def test_a_reference_that_is_not_dropped_is_seen(
    reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch, owner: type
) -> None:
    stress = Stress(reference_of("llava"), SEED)
    monkeypatch.setattr(owner, "free", lambda *_: None)
    with pytest.raises((AssertionError, InvariantError)):
        stress.run()
