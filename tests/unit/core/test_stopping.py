from __future__ import annotations

import pytest

from sensorium.core.request import Request
from sensorium.types.request import EngineCoreRequest, FinishReason
from sensorium.types.sampling import SamplingParams

EOS, STOP, PLAIN = 7, 8, 1


def make(params: SamplingParams, *outputs: int) -> Request:
    core_request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=(EOS, STOP),
        sampling_params=params,
        eos_token_ids=(EOS, EOS + 100),
    )
    request = Request(core_request, rank=(0, 0), block_size=4)
    for token_id in outputs:
        request.append_token(token_id)
    return request


@pytest.mark.parametrize("token_id", [EOS, EOS + 100])
def test_any_end_of_sequence_token_stops_without_a_stop_token(token_id: int) -> None:
    request = make(SamplingParams(), PLAIN, token_id)
    assert request.get_stop(max_model_len=50) == (FinishReason.STOP, None)


def test_stop_token_of_the_caller_is_named() -> None:
    request = make(SamplingParams(stop_token_ids=(STOP,)), STOP)
    assert request.get_stop(max_model_len=50) == (FinishReason.STOP, STOP)


def test_stop_token_counts_although_end_of_sequence_is_ignored() -> None:
    params = SamplingParams(stop_token_ids=(EOS,), ignore_eos=True)
    assert make(params, EOS).get_stop(max_model_len=50) == (FinishReason.STOP, EOS)


def test_an_ignored_end_of_sequence_continues() -> None:
    assert make(SamplingParams(ignore_eos=True), EOS).get_stop(max_model_len=50) is None


def test_a_plain_token_continues_the_request() -> None:
    assert make(SamplingParams(), PLAIN).get_stop(max_model_len=50) is None


def test_max_tokens_ends_the_request_by_length() -> None:
    params = SamplingParams(max_tokens=2)
    assert make(params, PLAIN).get_stop(max_model_len=50) is None
    assert make(params, PLAIN, PLAIN).get_stop(max_model_len=50) == (FinishReason.LENGTH, None)


def test_stopping_goes_before_length() -> None:
    params = SamplingParams(max_tokens=1)
    assert make(params, EOS).get_stop(max_model_len=50) == (FinishReason.STOP, None)


def test_a_full_context_ends_the_request_by_length() -> None:
    params = SamplingParams(max_tokens=None)
    assert make(params, PLAIN).get_stop(max_model_len=4) is None
    assert make(params, PLAIN, PLAIN).get_stop(max_model_len=4) == (FinishReason.LENGTH, None)


def test_nothing_stops_the_request_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(STOP,))
    assert make(params, EOS).get_stop(max_model_len=50) is None
    assert make(params, STOP).get_stop(max_model_len=50) is None
    assert make(params, PLAIN, EOS).get_stop(max_model_len=50) == (FinishReason.STOP, None)


def test_a_full_context_ends_the_request_even_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=5)
    assert make(params, PLAIN).get_stop(max_model_len=3) == (FinishReason.LENGTH, None)


def test_a_complete_answer_ends_whatever_it_says() -> None:
    for params in (
        SamplingParams(ignore_eos=True),
        SamplingParams(min_tokens=9),
        SamplingParams(max_tokens=1),
    ):
        stop = make(params, PLAIN).get_stop(max_model_len=50, is_complete=True)
        assert stop == (FinishReason.STOP, None)
