"""Paged attention equals dense attention over the whole sequence, whatever the step looks like."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from .paged_step import NULL_BLOCK, Chunk, PagedStep, Shape

BLOCK_SIZES = (1, 4, 16)
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (4, 1)}


def decode(length: int) -> Chunk:
    return Chunk(start=length - 1, end=length)


@pytest.fixture(params=BLOCK_SIZES, ids=lambda size: f"block{size}")
def block_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=HEADS.values(), ids=HEADS.keys())
def shape(request: pytest.FixtureRequest, block_size: int) -> Shape:
    num_heads, num_kv_heads = request.param
    return Shape(num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size)


def test_decoding_requests_of_skewed_lengths_share_a_step(shape: Shape) -> None:
    PagedStep(shape, [decode(n) for n in (1, 2, 100, 3, 16, 17, 15, 64, 33)]).check()


def test_a_lone_decoding_request_reads_all_its_positions(shape: Shape) -> None:
    PagedStep(shape, [decode(37)]).check()


def test_whole_prompts_are_causal(shape: Shape) -> None:
    PagedStep(shape, [Chunk(start=0, end=n) for n in (2, 16, 17, 5)]).check()


def test_a_chunk_sees_the_chunks_before_it(shape: Shape) -> None:
    PagedStep(shape, [Chunk(start=16, end=32), Chunk(start=3, end=9)]).check()


def test_decodes_whole_prompts_and_chunks_mix_in_one_step(shape: Shape) -> None:
    chunks = [decode(1), decode(40), Chunk(start=0, end=9), Chunk(start=7, end=20), decode(5)]
    PagedStep(shape, chunks).check()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 15, 16, 17, 1000])
def test_a_window_holds_its_last_positions_and_no_more(window: int, block_size: int) -> None:
    chunks = [
        *(decode(n) for n in (1, window, window + 1, 2 * window + 1, 50) if n <= 60),
        *(Chunk(start=0, end=n) for n in (window, window + 1) if 1 < n <= 60),
        Chunk(start=0, end=40),
        Chunk(start=19, end=23),
    ]
    PagedStep(Shape(block_size=block_size), chunks, windows=(window,)).check()


def test_groups_of_one_step_have_their_own_blocks_and_windows(block_size: int) -> None:
    chunks = [decode(30), decode(3), Chunk(start=0, end=8), Chunk(start=11, end=25)]
    PagedStep(Shape(block_size=block_size), chunks, windows=(None, 5, 12)).check()


@pytest.mark.parametrize("has_causal_full_layers", [False, True])
@pytest.mark.parametrize("window", [None, 3, 6, 12])
def test_a_span_is_seen_in_both_directions_within_the_window(
    window: int | None, block_size: int, has_causal_full_layers: bool
) -> None:
    chunks = [
        decode(20),
        Chunk(start=0, end=14, spans=((2, 7), (9, 12))),
        Chunk(start=8, end=24, spans=((8, 15), (20, 24))),
        Chunk(start=5, end=9),
    ]
    step = PagedStep(
        Shape(block_size=block_size),
        chunks,
        windows=(window, None),
        has_causal_full_layers=has_causal_full_layers,
    )
    step.check()


@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 4), (4, 12)])
def test_values_may_have_another_size_than_keys(key_dim: int, value_dim: int) -> None:
    chunks = [decode(9), decode(40), Chunk(start=0, end=6), Chunk(start=3, end=8)]
    PagedStep(Shape(key_dim=key_dim, value_dim=value_dim), chunks, windows=(None, 4)).check()


def test_new_keys_and_values_go_to_their_slots_and_nowhere_else(block_size: int) -> None:
    step = PagedStep(
        Shape(block_size=block_size), [decode(10), Chunk(start=0, end=5), Chunk(start=6, end=11)]
    )
    (cache,) = step.caches
    expected = [cache.keys.flatten(0, 1).clone(), cache.values.flatten(0, 1).clone()]
    for row, chunk in enumerate(step.chunks):
        slots = step.get_slots(0, row, chunk.start, chunk.end)
        for which, pool in enumerate(expected, start=1):
            pool[slots] = step.sequences[row][which][chunk.start :]
    step.run()
    assert torch.equal(cache.keys.flatten(0, 1), expected[0])
    assert torch.equal(cache.values.flatten(0, 1), expected[1])


def test_a_sharing_layer_reads_its_source_and_stores_nothing() -> None:
    step = PagedStep(Shape(), [decode(10), Chunk(start=6, end=11), Chunk(start=0, end=5)])
    (output,) = step.run()
    (source,) = step.caches
    stored = source.keys.clone()
    # What it would store, did it store: the keys of other tokens.
    step.sequences = [
        (query, key.flip(0) if chunk.start else key, value)
        for (query, key, value), chunk in zip(step.sequences, step.chunks, strict=True)
    ]
    shared = step.attend(replace(source, is_shared=True))
    assert torch.equal(source.keys, stored)
    assert torch.equal(shared, output)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("borders", [(0, 1, 2, 13), (0, 4, 8, 13), (0, 5, 12, 13), (0, 13)])
def test_a_prompt_may_be_cut_anywhere(window: int | None, borders: tuple[int, ...]) -> None:
    whole = PagedStep(Shape(), [Chunk(start=0, end=13)], windows=(window,))
    (query, key, value), (cache,) = whole.sequences[0], whole.caches
    outputs = []
    for start, end in pairwise(borders):
        step = PagedStep(Shape(), [Chunk(start=start, end=end)], windows=(window,))
        step.sequences = [(query[:end], key[:end], value[:end])]
        step.tables = [[whole.tables[0][0][: -(-end // 4)]]]
        step.backend.prepare(step.layout)
        outputs.append(step.attend(cache))
    torch.testing.assert_close(torch.cat(outputs), whole.get_expected(window), atol=2e-5, rtol=1e-4)


def make_padded_step() -> PagedStep:
    """A bucket of a short and a longer request: the short one is padded with the null block."""
    return PagedStep(Shape(block_size=4), [decode(9), decode(5), decode(11)])


def test_finite_garbage_behind_a_mask_changes_nothing() -> None:
    (output,) = make_padded_step().run()
    other = make_padded_step()
    other.caches[0].keys[NULL_BLOCK] = 7.0
    other.caches[0].values[NULL_BLOCK] = -7.0
    assert torch.equal(other.run()[0], output)


@pytest.mark.parametrize("place", ["the null block", "an unused slot of its last block"])
def test_a_nan_behind_a_mask_would_spoil_its_reader_so_the_cache_must_stay_finite(
    place: str,
) -> None:
    """A masked value is multiplied by zero, and NaN times zero is NaN.

    That is why the cache is zeroed at the start and why encoder outputs are checked. Should a
    backend not care, both may go.
    """
    step = make_padded_step()
    row = 1  # five positions in blocks of four: its second block has three unused slots
    if place == "the null block":
        step.caches[0].values[NULL_BLOCK] = float("nan")
    else:
        step.caches[0].values[step.tables[0][row][-1], 1:] = float("nan")
    (output,) = step.run()
    assert output[row].isnan().any()
