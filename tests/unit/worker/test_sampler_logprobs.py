"""Log-probabilities describe the model's own distribution, before bans, temperature and filters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sensorium.types.request import TokenLogprobs
from sensorium.types.sampling import SamplingParams
from sensorium.worker.sampling.sampler import Sampler
from sensorium.worker.sampling.sampling_row import SamplingRow

PROBABILITIES = [0.1, 0.4, 0.2, 0.3]
LOGITS = [math.log(p) + 5.0 for p in PROBABILITIES]
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def sample(*rows: SamplingRow) -> tuple[list[int], list[TokenLogprobs | None]]:
    logits = torch.tensor([LOGITS] * len(rows))
    output = Sampler(device=torch.device("cpu")).sample(logits, rows).read()
    return list(output.token_ids), list(output.logprobs)


def row(banned: tuple[int, ...] = (), **changes: object) -> SamplingRow:
    params = replace(GREEDY, **changes)
    return SamplingRow(params=params, num_output_tokens=0, banned_token_ids=banned)


def test_logprobs_are_made_only_for_rows_that_want_them() -> None:
    _, logprobs = sample(row(), row(logprobs=1), row())
    assert [entry is None for entry in logprobs] == [True, False, True]


def test_the_top_tokens_come_likeliest_first_with_their_values() -> None:
    _, (entry,) = sample(row(logprobs=3))
    assert entry is not None
    assert entry.top_token_ids == (1, 3, 2)
    assert entry.top_logprobs == pytest.approx([math.log(p) for p in (0.4, 0.3, 0.2)], abs=1e-6)


def test_each_row_gets_as_many_as_it_asked_for() -> None:
    _, entries = sample(row(logprobs=1), row(logprobs=0), row(logprobs=4))
    counts = [len(entry.top_token_ids) for entry in entries if entry is not None]
    assert counts == [1, 0, 4]


@pytest.mark.parametrize(("banned", "rank"), [((), 1), ((1,), 2), ((1, 3), 3), ((1, 2, 3), 4)])
def test_the_chosen_token_has_its_rank_in_the_unrestricted_distribution(
    banned: tuple[int, ...], rank: int
) -> None:
    (token_id,), (entry,) = sample(row(banned, logprobs=0))
    assert entry is not None
    assert entry.rank == rank
    assert entry.logprob == pytest.approx(math.log(PROBABILITIES[token_id]), abs=1e-6)


def test_temperature_and_filters_do_not_change_logprobs() -> None:
    _, (entry,) = sample(row(temperature=0.2, top_k=1, top_p=0.1, logprobs=2))
    assert entry is not None
    assert entry.logprob == pytest.approx(math.log(0.4), abs=1e-6)
    assert entry.top_logprobs == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)
