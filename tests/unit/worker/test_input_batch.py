"""A step's schedule as tensors: order, positions, tables, embeddings, and who samples."""

from __future__ import annotations

import numpy as np
import torch

from sensorium.types.scheduling import KVCacheGroup
from sensorium.utils.arrays import StagingBuffer
from sensorium.worker.encoder_runner import EncoderCache
from sensorium.worker.input_batch import InputBatch, Row, StepInputs
from sensorium.worker.request_states import PromptPositions

from .factories import get_table, make_feature, make_request, make_scheduled, make_state


def make_batch(
    cache: EncoderCache | None = None,
    *,
    windows: tuple[int | None, ...] = (None,),
    bidirectional: frozenset[str] = frozenset(),
    has_long_factors: bool = False,
    has_mrope: bool = False,
) -> InputBatch:
    return InputBatch(
        groups=[KVCacheGroup(num_blocks=99, window=window) for window in windows],
        block_size=4,
        bidirectional_modalities=bidirectional,
        has_long_factors=has_long_factors,
        has_mrope=has_mrope,
        encoder_cache=cache or EncoderCache(),
        table=get_table(len(windows)),
        staging=StagingBuffer(device=torch.device("cpu"), num_words=4),
    )


def make_row(
    request_id: str, start: int, end: int, *, num_prompt: int = 20, num_sampled: int = 1
) -> Row:
    """Token p of a request is 100 times its number, plus p."""
    base = 100 * int(request_id)
    request = make_request(tuple(range(base, base + num_prompt)), request_id=request_id)
    first_block = 10 * int(request_id)
    blocks = tuple(range(first_block, first_block + -(-end // 4)))
    state = make_state(request, (blocks,))
    return make_scheduled(request_id, start, end, num_sampled=num_sampled), state


def get_ids(inputs: StepInputs) -> list[str]:
    return [scheduled.request_id for scheduled, _ in inputs.rows]


def test_requests_with_one_token_come_first_and_the_rest_keeps_its_order() -> None:
    rows = [make_row("1", 0, 3), make_row("2", 5, 6), make_row("3", 2, 4), make_row("4", 0, 1)]
    inputs = make_batch().prepare(rows)
    assert get_ids(inputs) == ["2", "4", "1", "3"]
    assert inputs.layout.query_lens == (1, 1, 3, 2)
    assert inputs.layout.seq_lens == (6, 1, 3, 4)
    assert inputs.layout.num_decodes == 2
    assert inputs.input_ids.tolist() == [205, 400, 100, 101, 102, 302, 303]
    assert inputs.positions.tolist() == [5, 0, 0, 1, 2, 2, 3]


def test_only_rows_that_sample_have_logits_and_they_are_of_their_last_token() -> None:
    rows = [
        make_row("1", 0, 3, num_sampled=0),
        make_row("2", 5, 6),
        make_row("3", 2, 5),
        make_row("4", 7, 8, num_sampled=0),
    ]
    inputs = make_batch().prepare(rows)
    assert get_ids(inputs) == ["2", "4", "1", "3"]
    assert inputs.logits_index.tolist() == [0, 7]
    assert [state.request.request_id for state in inputs.sampled] == ["2", "3"]


def test_a_step_without_samples_has_an_empty_logits_index() -> None:
    inputs = make_batch().prepare([make_row("1", 0, 3, num_sampled=0)])
    assert inputs.logits_index.shape == (0,)
    assert inputs.sampled == ()


def test_each_group_has_its_slots_and_its_padded_tables() -> None:
    scheduled = [
        make_scheduled("a", 3, 6, block_ids=((), ())),
        make_scheduled("b", 0, 2, block_ids=((), ())),
    ]
    states = [
        make_state(make_request(tuple(range(9))), ((7, 8), (5, 6))),
        make_state(make_request(tuple(range(9))), ((3,), (4,))),
    ]
    inputs = make_batch(windows=(None, 8)).prepare(list(zip(scheduled, states, strict=True)))
    full, windowed = inputs.layout.groups
    assert (full.window, windowed.window) == (None, 8)
    assert full.slot_mapping.tolist() == [31, 32, 33, 12, 13]
    assert windowed.slot_mapping.tolist() == [23, 24, 25, 16, 17]
    assert full.block_tables.tolist() == [[7, 8], [3, 0]]
    assert windowed.block_tables.tolist() == [[5, 6], [4, 0]]


def test_mrope_positions_have_three_rows() -> None:
    positions = PromptPositions(positions=np.arange(9).reshape(3, 3), delta=4)
    state = make_state(make_request((1, 2, 3)), ((1,),), mrope=positions)
    decoding = make_state(make_request((1, 2, 3)), ((1,),), output_token_ids=(8,), mrope=positions)
    rows = [(make_scheduled("a", 1, 3), state), (make_scheduled("b", 3, 4), decoding)]
    inputs = make_batch(has_mrope=True).prepare(rows)
    assert inputs.positions.tolist() == [[7, 1, 2], [7, 4, 5], [7, 7, 8]]
    assert inputs.input_ids.tolist() == [8, 2, 3]


def test_embeddings_are_gathered_for_the_window_of_each_row() -> None:
    cache = EncoderCache()
    cache.add("x", torch.arange(4.0)[:, None])
    cache.add("y", torch.arange(10.0, 12.0)[:, None])
    cache.add("x/None/'salt'", torch.arange(20.0, 24.0)[:, None])
    x, y = make_feature("x", 1, 4), make_feature("y", 6, 3, (True, False, True))
    prompt = tuple(range(10))
    rows = [
        (make_scheduled("a", 2, 9), make_state(make_request(prompt, x, y), ((1, 2, 3),))),
        (
            make_scheduled("b", 4, 5),
            make_state(make_request(prompt, x, cache_salt="salt"), ((4, 5),)),
        ),
    ]
    inputs = make_batch(cache).prepare(rows)
    assert inputs.mm_index is not None
    assert inputs.mm_embeds is not None
    embed_at = dict(zip(inputs.mm_index.tolist(), inputs.mm_embeds[:, 0].tolist(), strict=True))
    # Token 0 is b's position 4; tokens 1 to 7 are a's positions 2 to 8.
    assert embed_at == {0: 23.0, 1: 1.0, 2: 2.0, 3: 3.0, 5: 10.0, 7: 11.0}


def test_a_step_without_media_has_no_embeddings_and_is_causal() -> None:
    inputs = make_batch(bidirectional=frozenset({"image"})).prepare([make_row("1", 0, 3)])
    assert inputs.mm_index is None
    assert inputs.mm_embeds is None
    assert inputs.layout.attend_until is None


def make_rows_with_spans() -> tuple[EncoderCache, list[Row]]:
    cache = EncoderCache()
    cache.add("x", torch.zeros(4, 1))
    cache.add("v", torch.zeros(2, 1))
    x = make_feature("x", 1, 5, (True, True, False, True, True))
    v = make_feature("v", 7, 2, modality="video")
    with_media = make_state(make_request(tuple(range(10)), x, v), ((1, 2, 3),))
    rows = [(make_scheduled("a", 0, 9), with_media), make_row("2", 5, 6), make_row("3", 2, 4)]
    return cache, rows


def test_only_spans_of_bidirectional_modalities_are_seen_beyond_the_own_position() -> None:
    cache, rows = make_rows_with_spans()
    inputs = make_batch(cache, bidirectional=frozenset({"image"})).prepare(rows)
    assert inputs.layout.attend_until is not None
    decoding, a, b = inputs.layout.attend_until.split([1, 9, 2])
    assert decoding.tolist() == [6]
    # Positions 1 and 2 are a span up to 3, positions 4 and 5 one up to 6; the video is causal.
    assert a.tolist() == [1, 3, 3, 4, 6, 6, 7, 8, 9]
    assert b.tolist() == [3, 4]


def test_a_model_without_bidirectional_modalities_is_causal_everywhere() -> None:
    cache, rows = make_rows_with_spans()
    assert make_batch(cache).prepare(rows).layout.attend_until is None


def test_new_blocks_that_the_step_does_not_fill_are_known() -> None:
    """The first request ends inside its last block of 4 tokens.

    The second fills its only block, and the third has none that is new.
    """
    states = [make_state(make_request(tuple(range(9))), ((7, 8),)) for _ in range(3)]
    scheduled = [
        make_scheduled("a", 0, 6, block_ids=((7, 8),)),
        make_scheduled("b", 0, 4, block_ids=((7,),)),
        make_scheduled("c", 1, 3, block_ids=((),)),
    ]
    inputs = make_batch().prepare(list(zip(scheduled, states, strict=True)))
    assert [block_ids.tolist() for block_ids in inputs.partial_blocks] == [[8]]


def test_tokens_are_marked_by_the_length_of_their_request() -> None:
    rows = [make_row("1", 0, 3), make_row("2", 5, 6), make_row("3", 2, 4)]
    get_table(1).is_long[[rows[0][1].row, rows[1][1].row]] = 1
    assert make_batch().prepare(rows).is_long is None
    inputs = make_batch(has_long_factors=True).prepare(rows)
    assert get_ids(inputs) == ["2", "1", "3"]
    assert inputs.is_long is not None
    assert inputs.is_long.tolist() == [True, True, True, True, False, False]
