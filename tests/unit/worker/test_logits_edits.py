"""Penalties and bans are Transformers' own, and come in the documented order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from sensorium.types.sampling import TokenBans
from sensorium.utils.arrays import StagingBuffer
from sensorium.worker.sampling.logits_edits import apply_edits, prepare_edits
from sensorium.worker.sampling.sampler import Sampler, SamplerOutput
from sensorium.worker.sampling.sampling_row import SamplingRow

from .factories import GREEDY, make_request, make_state

CPU = torch.device("cpu")
VOCAB_SIZE = 50
PROMPT = (3, 9, 3, 47, 60)  # 60 is a placeholder outside the vocabulary
OUTPUT = (9, 11, 12, 11)


def make_row(bans: TokenBans | None = None, **params: Any) -> SamplingRow:
    request = make_request(PROMPT, params=replace(GREEDY, **params), bans=bans or TokenBans())
    return make_state(request, output_token_ids=OUTPUT).get_sampling_row()


def make_logits(num_rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 4 * torch.randn(num_rows, VOCAB_SIZE, generator=generator)


def edit(logits: torch.Tensor, *rows: SamplingRow) -> torch.Tensor:
    arrays = prepare_edits(rows, logits.shape[-1])
    return apply_edits(logits, StagingBuffer(device=CPU).upload(arrays))


def sample(logits: torch.Tensor, *rows: SamplingRow) -> SamplerOutput:
    return Sampler(device=CPU).sample(logits, rows).read()


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = make_logits()
    processor = hf.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    assert edit(logits, make_row(repetition_penalty=penalty)).equal(expected)
    assert not expected.equal(logits)


def test_bad_words_are_those_of_transformers() -> None:
    """Words are single tokens and sequences that the last tokens begin, or don't.

    One begins in the prompt, and one is longer than everything there is.
    """
    sequences = ((7,), (12, 11, 20), (11, 11, 21), (60, *OUTPUT, 22), (1,) * 20, (11, 7))
    logits = make_logits()
    processor = hf.NoBadWordsLogitsProcessor([list(sequence) for sequence in sequences[:3]])
    expected = processor(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    assert edit(logits, make_row(TokenBans(sequences=sequences[:3]))).equal(expected)
    banned = edit(logits, make_row(TokenBans(sequences=sequences))).isneginf().nonzero()[:, 1]
    assert banned.tolist() == [7, 20, 22]


def test_suppressed_tokens_are_those_of_transformers() -> None:
    logits = make_logits()
    expected = hf.SuppressTokensLogitsProcessor([1, 49, 3])(None, logits.clone())
    bans = TokenBans(sequences=((1,), (49,), (3,), (50,)))
    assert edit(logits, make_row(bans)).equal(expected)


def test_tokens_suppressed_at_the_start_are_allowed_later() -> None:
    bans = TokenBans(first_token_ids=(4, 5))
    request = make_request(PROMPT, bans=bans)
    assert make_state(request).get_sampling_row().banned_token_ids == (4, 5)
    assert make_row(bans).banned_token_ids == ()


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (8, 1.0), (0, 0.7), (12, 0.8)])
def test_filters_leave_what_those_of_transformers_leave(
    min_p: float, top_k: int, top_p: float
) -> None:
    logits = make_logits() / 4
    expected = logits / 0.7
    if top_k:
        expected = hf.TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = hf.TopPLogitsWarper(top_p)(None, expected)
    expected = hf.MinPLogitsWarper(min_p)(None, expected)
    params = {"temperature": 0.7, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    rows = [make_row(seed=seed, **params) for seed in range(3000)]
    drawn = sample(logits.expand(len(rows), -1), *rows).token_ids
    probabilities = expected.softmax(-1)[0]
    assert set(drawn) <= set(probabilities.nonzero()[:, 0].tolist())
    likely = (probabilities > 0.005).nonzero()[:, 0].tolist()
    assert set(likely) <= set(drawn)


def test_output_tokens_are_penalised_by_presence_and_frequency_and_the_prompt_is_not() -> None:
    change = edit(torch.zeros(1, VOCAB_SIZE), make_row(presence_penalty=0.5, frequency_penalty=1.0))
    assert {i: float(change[0, i]) for i in change[0].nonzero()[:, 0].tolist()} == {
        9: -1.5,
        11: -2.5,
        12: -1.5,
    }


def test_bias_comes_before_the_repetition_penalty_and_that_before_the_others() -> None:
    logits = torch.full((1, VOCAB_SIZE), -1.0)
    row = make_row(logit_bias={9: 3.0, 11: 0.5}, repetition_penalty=2.0, presence_penalty=0.25)
    edited = edit(logits, row)
    assert edited[0, 9] == (-1 + 3) / 2 - 0.25
    assert edited[0, 11] == (-1 + 0.5) * 2 - 0.25
    assert edited[0, 3] == -2.0
    assert edited[0, 0] == -1.0


def test_bans_come_last() -> None:
    row = make_row(
        TokenBans(sequences=((1,), (2,))),
        logit_bias={1: 100, 2: 100, 3: 50},
        allowed_token_ids=(1, 3, 4),
    )
    edited = edit(make_logits(), row)
    assert edited.isfinite().nonzero()[:, 1].tolist() == [3, 4]
    assert sample(make_logits(), row).token_ids == (3,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "knobs",
    [
        {"logit_bias": {17: 100}},
        {"allowed_token_ids": [17]},
        {"bans": TokenBans(sequences=tuple((i,) for i in range(VOCAB_SIZE) if i != 17))},
    ],
    ids=str,
)
def test_greedy_and_sampled_rows_honour_them(knobs: dict[str, Any], temperature: float) -> None:
    assert sample(make_logits(), make_row(temperature=temperature, **knobs)).token_ids == (17,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}])
def test_a_row_without_an_allowed_token_fails_only_itself_with_the_reason(
    temperature: float, filters: dict[str, Any]
) -> None:
    banned = make_row(
        TokenBans(sequences=((5,),)), allowed_token_ids=[5], temperature=temperature, **filters
    )
    broken = torch.full((1, VOCAB_SIZE), float("nan"))
    plain = make_logits()
    output = sample(torch.cat([plain, plain, broken]), make_row(), banned, banned)
    assert output.token_ids == (int(plain.argmax()), None, None)
    assert "no token is left to choose from: the request's allowed_token_ids" in output.failures[1]
    assert "not a finite number" in output.failures[2]


def test_rows_without_settings_need_no_edits() -> None:
    request = make_request(PROMPT)
    row = make_state(request).get_sampling_row()
    assert prepare_edits([row, row], VOCAB_SIZE) == {}


def make_mask(*token_ids: int, num_words: int = 2) -> Any:
    words = np.zeros(num_words, dtype=np.uint64)
    for token_id in token_ids:
        words[token_id // 64] |= np.uint64(1 << token_id % 64)
    return words.view(np.int64)


@pytest.mark.parametrize("vocab_size", [50, 64, 100, 128, 200])
def test_a_mask_leaves_what_it_allows_and_other_rows_as_they_are(vocab_size: int) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1))
    allowed = [token_id for token_id in (0, 7, 8, 31, 49, 63, 64, 127) if token_id < vocab_size]
    row = replace(make_row(), mask=make_mask(*allowed, 126))
    edited = edit(logits, make_row(), row, make_row(logit_bias={5: 1.0}))
    assert edited[0].equal(logits[0])
    assert edited[2, 6:].equal(logits[2, 6:])
    kept = {*allowed, *({126} if vocab_size > 126 else set())}
    assert set(edited[1].isfinite().nonzero().flatten().tolist()) == kept
    assert edited[1, list(kept)].equal(logits[1, list(kept)])


def test_a_mask_and_bans_that_leave_no_token_fail_only_that_row() -> None:
    logits = make_logits(2)
    banned = replace(make_row(allowed_token_ids=(4,)), mask=make_mask(5))
    output = sample(logits, banned, make_row())
    assert output.token_ids == (None, int(logits[1].argmax()))
    assert "structured_outputs" in output.failures[0]
