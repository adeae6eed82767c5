"""The vectorised sampler equals a plain one, row by row, in batches of mixed settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sensorium.types.sampling import SamplingParams, TokenBans
from sensorium.utils.arrays import StagingBuffer
from sensorium.worker.sampling.drawing import get_uniforms
from sensorium.worker.sampling.logits_edits import apply_edits, prepare_edits
from sensorium.worker.sampling.sampler import Sampler, SamplerOutput
from tests.unit.worker.factories import make_request, make_state

VOCAB_SIZE = 11
CPU = torch.device("cpu")

token_ids = st.integers(0, VOCAB_SIZE + 1)  # placeholders may lie outside the vocabulary
known_ids = st.integers(0, VOCAB_SIZE - 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: everything that its next token depends on."""

    params: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    bans: TokenBans
    eos: tuple[int, ...]
    logits: tuple[float, ...]

    def make_row(self):  # type: ignore[no-untyped-def]
        request = make_request(
            self.prompt, params=self.params, bans=self.bans, eos_token_ids=self.eos
        )
        # Half of the output is there at the start, as after a preemption.
        split = len(self.output) // 2
        state = make_state(request, output_token_ids=self.output[:split])
        for token_id in self.output[split:]:
            state.append_token(token_id)
        return state.get_sampling_row()


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.0, 0.3, 1.0, 2.5)),
    top_k=st.sampled_from((0, 0, 1, 3, 100)),
    top_p=st.sampled_from((1.0, 1.0, 0.2, 0.8)),
    min_p=st.sampled_from((0.0, 0.0, 0.07, 0.6)),
    repetition_penalty=st.sampled_from((1.0, 1.0, 0.7, 1.8)),
    presence_penalty=st.sampled_from((0.0, 0.0, 1.5, -0.5)),
    frequency_penalty=st.sampled_from((0.0, 0.0, 0.25, -1.0)),
    logit_bias=st.dictionaries(known_ids, st.sampled_from((-100, -1.5, 2, 100)), max_size=3),
    allowed_token_ids=st.none() | st.lists(known_ids, min_size=3, max_size=6),
    seed=st.integers(0, 9),
    min_tokens=st.sampled_from((0, 0, 4)),
    max_tokens=st.just(99),
    stop_token_ids=st.lists(token_ids, max_size=2),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
bans = st.builds(
    TokenBans,
    sequences=st.lists(
        st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=4
    ).map(tuple),
    first_token_ids=st.lists(token_ids, max_size=2).map(tuple),
)
cases = st.builds(
    Case,
    params=params,
    prompt=st.lists(token_ids, min_size=1, max_size=6).map(tuple),
    output=st.lists(st.integers(0, 4), max_size=6).map(tuple),
    bans=st.just(TokenBans()) | bans,
    eos=st.lists(known_ids, max_size=1).map(tuple),
    logits=st.lists(
        st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE
    ).map(tuple),
)


def sample(batch: list[Case]) -> SamplerOutput:
    logits = torch.tensor([case.logits for case in batch])
    return Sampler(device=CPU).sample(logits, [case.make_row() for case in batch]).read()


def edit(batch: list[Case]) -> torch.Tensor:
    logits = torch.tensor([case.logits for case in batch])
    arrays = prepare_edits([case.make_row() for case in batch], VOCAB_SIZE)
    return apply_edits(logits, StagingBuffer(device=CPU).upload(arrays)) if arrays else logits


def edit_plainly(case: Case) -> list[float]:
    """What the documentation says, in its order, one token at a time."""
    params = case.params
    edited = []
    for token_id, value in enumerate(case.logits):
        value += params.logit_bias.get(token_id, 0.0)
        count = case.output.count(token_id)
        if token_id in case.prompt + case.output:
            penalty = params.repetition_penalty
            value = value * penalty if value < 0 else value / penalty
        value -= params.frequency_penalty * count
        value -= params.presence_penalty if count else 0.0
        edited.append(-math.inf if is_banned(case, token_id) else value)
    return edited


def is_banned(case: Case, token_id: int) -> bool:
    params = case.params
    everything = (*case.prompt, *case.output, token_id)
    is_early = len(case.output) < params.min_tokens
    is_end = token_id in params.stop_token_ids or (token_id in case.eos and not params.ignore_eos)
    return (
        (params.allowed_token_ids is not None and token_id not in params.allowed_token_ids)
        or any(everything[-len(s) :] == s for s in case.bans.sequences)
        or (not case.output and token_id in case.bans.first_token_ids)
        or (is_early and is_end)
    )


def choose_plainly(case: Case) -> int | None:
    logits = edit_plainly(case)
    highest = max(logits)
    params = case.params
    if highest == -math.inf:
        return None
    if params.is_greedy:
        assume(sum(highest - value < 1e-4 for value in logits) == 1)
        return logits.index(highest)
    weights = [math.exp((value - highest) / params.temperature) for value in logits]
    kept = filter_plainly(weights, params)
    target = get_uniforms([params.seed], [len(case.output)])[0] * sum(kept)
    total = 0.0
    for token_id, weight in enumerate(kept):
        assume(abs(total + weight - target) > 1e-4 * sum(kept))
        total += weight
        if total > target:
            return token_id
    raise AssertionError("the weights do not add up")


def filter_plainly(weights: list[float], params: SamplingParams) -> list[float]:
    """Return the tokens that top-k, top-p and min-p leave, one filter after the other.

    They are the k likeliest; the fewest of these with `top_p` of their mass; and of these, those
    with at least `min_p` of the likeliest's probability.
    """
    ranked = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    at_k = ranked[: params.top_k or None]
    border = weights[ranked[min(len(at_k), len(ranked) - 1)]]
    # Rounding decides between tokens that are almost the same.
    assume(len(at_k) == len(ranked) or weights[at_k[-1]] - border > 1e-4 * weights[ranked[0]])
    mass = sum(weights[i] for i in at_k)
    kept, total = [0.0] * len(weights), 0.0
    for i in at_k:
        assume(params.top_p == 1.0 or abs(total / mass - params.top_p) > 1e-4)
        assume(abs(weights[i] - params.min_p) > 1e-4 * (params.min_p > 0))
        if (params.top_p == 1.0 or total / mass < params.top_p) and weights[i] >= params.min_p:
            kept[i] = weights[i]
        total += weights[i]
    return kept


@given(batch=st.lists(cases, min_size=1, max_size=6))
@settings(max_examples=300)
def test_edited_logits_are_those_of_the_plain_reference(batch: list[Case]) -> None:
    expected = torch.tensor([edit_plainly(case) for case in batch])
    torch.testing.assert_close(edit(batch), expected, rtol=1e-5, atol=1e-5)


@given(case=cases)
@settings(max_examples=500)
def test_a_row_chooses_what_the_plain_reference_chooses(case: Case) -> None:
    expected = choose_plainly(case)
    output = sample([case])
    assert output.token_ids == (expected,)
    assert (0 in output.failures) == (expected is None)


@given(batch=st.lists(cases, min_size=1, max_size=6))
@settings(max_examples=200)
def test_a_row_is_the_same_alone_and_in_any_batch(batch: list[Case]) -> None:
    together = sample(batch)
    for index, case in enumerate(batch):
        alone = sample([case])
        assert together.token_ids[index] == alone.token_ids[0]
        assert together.logprobs[index] == alone.logprobs[0]
        assert together.failures.get(index) == alone.failures.get(0)
        assert edit(batch)[index].equal(edit([case])[0])


@given(batch=st.lists(cases, min_size=1, max_size=4))
@settings(max_examples=100)
def test_log_probabilities_are_those_of_the_untouched_logits(batch: list[Case]) -> None:
    logits = torch.tensor([case.logits for case in batch])
    output = Sampler(device=CPU).sample(logits, [case.make_row() for case in batch]).read()
    assert logits.equal(torch.tensor([case.logits for case in batch]))
    for case, token_id, entry in zip(batch, output.token_ids, output.logprobs, strict=True):
        assert (entry is None) == (case.params.logprobs is None)
        if entry is None or token_id is None:
            continue
        logprobs = torch.tensor(case.logits).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(logprobs[token_id]), abs=1e-6)
        assert entry.rank == sum(value > case.logits[token_id] for value in case.logits) + 1
        assert len(entry.top_token_ids) == min(case.params.logprobs or 0, VOCAB_SIZE)
