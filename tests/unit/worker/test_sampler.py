"""The sampler draws from exactly the distribution that the parameters say, row by row."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sensorium.types.sampling import SamplingParams
from sensorium.worker.sampling import drawing
from sensorium.worker.sampling.drawing import _filter, _get_width, get_uniforms
from sensorium.worker.sampling.sampler import Sampler
from sensorium.worker.sampling.sampling_row import SamplingRow

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=0)
GREEDY = replace(PLAIN, temperature=0.0)
CPU = torch.device("cpu")
GRID = 512  # draws of one distribution, evenly spread over [0, 1)

logit_lists = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=12)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.3, 0.7, 1.0, 2.5)),
    top_k=st.sampled_from((0, 0, 1, 2, 3, 100)),
    top_p=st.sampled_from((1.0, 1.0, 0.05, 0.5, 0.9)),
    seed=st.integers(0, 5),
)


def sample(logits: list[list[float]], rows: list[SamplingRow]) -> list[int | None]:
    return list(Sampler(device=CPU).sample(torch.tensor(logits), rows).read().token_ids)


def row(params: SamplingParams, index: int = 0, **changes: object) -> SamplingRow:
    return SamplingRow(params=params, num_output_tokens=index, **changes)


def get_distribution(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Temperature, then the k likeliest, then as few of these as hold `top_p` of their mass."""
    temperature = params.temperature or 1.0
    weights = {i: math.exp((x - max(logits)) / temperature) for i, x in enumerate(logits)}
    ranked = sorted(weights, key=lambda i: (-weights[i], i))[: params.top_k or None]
    total = sum(weights[i] for i in ranked)
    kept: dict[int, float] = {}
    for token_id in ranked:
        share_before = sum(kept.values()) / total
        assume(params.top_p == 1.0 or abs(share_before - params.top_p) > 1e-5)
        if share_before >= params.top_p and params.top_p < 1.0:
            break
        kept[token_id] = weights[token_id]
    return {token_id: weight / sum(kept.values()) for token_id, weight in kept.items()}


def count_draws(logits: list[float], params: SamplingParams) -> Counter[int]:
    grid = (np.arange(GRID) + 0.5) / GRID
    with mock.patch.object(drawing, "get_uniforms", return_value=grid):
        return Counter(sample([logits] * GRID, [row(params)] * GRID))


@given(logits=logit_lists, params=params.filter(lambda p: not p.is_greedy))
@settings(deadline=None, max_examples=150)
def test_draws_follow_the_filtered_distribution(
    logits: list[float], params: SamplingParams
) -> None:
    expected = get_distribution(logits, params)
    counts = count_draws(logits, params)
    assert set(counts) <= set(expected)
    for token_id, probability in expected.items():
        # Each token owns one interval of [0, 1), which holds its share of the grid, give or take
        # one point.
        assert abs(counts[token_id] - probability * GRID) <= 1.001


@pytest.mark.parametrize(
    ("changes", "support"),
    [
        ({}, {0, 1, 2, 3}),
        ({"temperature": 0.01}, {2}),
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {2, 0}),
        ({"top_k": 1000}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {2}),
        ({"top_p": 0.41}, {2, 0}),
        ({"top_p": 0.71}, {2, 0, 3}),
        ({"top_p": 1e-6}, {2}),
        # 0.4 and 0.3 are 4/7 and 3/7 of the two likeliest: the first alone holds more than half.
        ({"top_k": 2, "top_p": 0.5}, {2}),
        ({"min_p": 0.3}, {2, 0, 3}),
        ({"min_p": 0.6}, {2, 0}),
        ({"min_p": 1.0}, {2}),
        ({"top_k": 2, "min_p": 0.3}, {2, 0}),
        # Temperature first: 16, 9, 4 and 1 thirtieths.
        ({"temperature": 0.5, "min_p": 0.3}, {2, 0}),
        # The other way round, 0.4 and 0.3 would be more than 0.75 of the 0.9 that `min_p` leaves.
        ({"top_p": 0.75, "min_p": 0.3}, {2, 0, 3}),
    ],
)
def test_the_support_is_what_the_filters_leave(
    changes: dict[str, float], support: set[int]
) -> None:
    logits = [math.log(p) for p in (0.3, 0.1, 0.4, 0.2)]
    assert set(count_draws(logits, replace(PLAIN, **changes))) == support


def test_top_k_keeps_the_lower_ids_of_a_tie() -> None:
    logits = [1.0] + [2.0] * 999
    assert set(count_draws(logits, replace(PLAIN, top_k=2))) == {1, 2}


@given(
    batch=st.lists(st.tuples(params, st.integers(0, 9), st.integers(0, 10**6)), max_size=6),
    vocab_size=st.integers(2, 40),
)
@settings(deadline=None, max_examples=100)
def test_a_row_chooses_the_same_token_alone_and_in_any_batch(
    batch: list[tuple[SamplingParams, int, int]], vocab_size: int
) -> None:
    assume(batch)
    logits = [
        torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)).tolist()
        for _, _, seed in batch
    ]
    rows = [row(params, index) for params, index, _ in batch]
    alone = [sample([entry], [r])[0] for entry, r in zip(logits, rows, strict=True)]
    assert sample(logits, rows) == alone


def test_a_filtered_neighbour_does_not_change_an_unfiltered_row() -> None:
    logits = torch.linspace(-1, 1, 50).tolist()
    plain = [row(replace(PLAIN, seed=seed)) for seed in range(20)]
    alone = sample([logits] * 20, plain)
    filtered = row(replace(PLAIN, top_k=5, top_p=0.5))
    assert sample([logits] * 21, [*plain, filtered])[:20] == alone
    assert len(set(alone)) > 5


def test_draws_change_with_the_seed_and_with_the_index() -> None:
    logits = [0.0] * 1000
    by_index = sample([logits] * 50, [row(PLAIN, index) for index in range(50)])
    by_seed = sample([logits] * 50, [row(replace(PLAIN, seed=seed)) for seed in range(50)])
    assert len(set(by_index)) > 40
    assert len(set(by_seed)) > 40
    assert by_index[1:] != by_seed[1:]


def test_the_likeliest_token_is_chosen_greedily_and_the_first_of_a_tie() -> None:
    logits = [[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [0.0, 1.0, 2.0, 3.0]]
    assert sample(logits, [row(GREEDY)] * 3) == [1, 0, 3]


@pytest.mark.parametrize("params", [GREEDY, PLAIN, replace(PLAIN, top_k=1)])
def test_a_banned_token_is_never_chosen(params: SamplingParams) -> None:
    logits = [[9.0, 8.0, 7.0, -50.0], [9.0, 8.0, 7.0, -50.0]]
    rows = [row(params, banned_token_ids=(0, 1)), row(params)]
    assert sample(logits, rows)[0] == 2
    assert sample(logits, rows)[1] in (0, 1)


def test_a_uniform_close_to_one_still_chooses_a_token_with_weight() -> None:
    with mock.patch.object(drawing, "get_uniforms", return_value=np.array([1 - 2.0**-53, 0.0])):
        assert sample([[-1e9, 0.0, 0.0, -1e9]] * 2, [row(PLAIN)] * 2) == [2, 1]


@pytest.mark.parametrize("params", [PLAIN, GREEDY])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_not_finite_give_no_token(params: SamplingParams, broken: float) -> None:
    logits = [[0.0, broken, 1.0, 2.0], [0.0, 9.0, 0.0, 0.0], [-math.inf] * 4]
    tokens = sample(logits, [row(params), row(GREEDY), row(params)])
    assert tokens == [None, 1, None]


def test_uniforms_are_spread_evenly_over_seeds_and_indices() -> None:
    values = get_uniforms([s for s in range(64) for _ in range(64)], list(range(64)) * 64)
    assert values.min() >= 0
    assert values.max() < 1
    counts, _ = np.histogram(values, bins=16, range=(0, 1))
    expected = len(values) / 16
    assert ((counts - expected) ** 2 / expected).sum() < 40  # chi-square, 15 degrees of freedom
    grid = values.reshape(64, 64)
    for other in (grid[1:, :], grid[:, 1:]):
        rows, columns = other.shape
        first = grid[:rows, :columns]
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.06


def test_any_integer_is_a_seed() -> None:
    seeds = [0, -1, 2**63, 2**64 - 2, 2**64 + 5]
    assert len(set(get_uniforms(seeds, [0] * 5))) == 5
    assert get_uniforms([7], [3]) == get_uniforms([1, 7], [3, 3])[1]


def keep_by_sorting(probs: torch.Tensor, top_k: int, top_p: float) -> list[int]:
    """Return the tokens that a filter keeps, found by sorting all of them."""
    ranked, order = probs.sort(descending=True, stable=True)
    mass = ranked[: top_k or None].double().cumsum(0)
    kept = mass - ranked[: top_k or None] < top_p * mass[-1]
    return sorted(order[: top_k or None][kept].tolist())


@pytest.mark.parametrize("top_k", [0, 1, 2, 63, 64, 65, 1024, 1025])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.97, np.inf])
@pytest.mark.parametrize("num_levels", [3, 40, 100_000])
def test_a_filter_keeps_what_sorting_keeps_also_among_equals(
    top_k: int, top_p: float, num_levels: int
) -> None:
    if not top_k and top_p == np.inf:
        return  # no filter
    generator = torch.Generator().manual_seed(top_k)
    levels = torch.randint(num_levels, (3, 3000), generator=generator)
    probs = (levels.float() * (8 / num_levels)).softmax(-1)
    width = _get_width(top_k, top_p)
    assert width is not None
    bounds = torch.full((3,), top_k or 3000), torch.full((3,), top_p, dtype=torch.float64)
    filtered = _filter(probs, *bounds, width)
    for row in range(3):
        kept = filtered[row].nonzero()[:, 0].tolist()
        assert kept == keep_by_sorting(probs[row], top_k, top_p)
        assert torch.equal(filtered[row][kept], probs[row][kept])
