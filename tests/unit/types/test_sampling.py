"""What a caller may say about sampling, and what is refused by the name of its field."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sensorium.types.errors import RequestError
from sensorium.types.sampling import GenerationDefaults, SamplingParams, TokenBans


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("n", (0, -1, 129, 1.0, True, "2", None), "an integer in [1, 128]"),
        ("min_p", (-0.1, 1.1, math.nan, "0", True), "a number in [0, 1]"),
        ("repetition_penalty", (0, 0.0, -1, 101, math.inf, "1"), "a number in [0.01, 100]"),
        ("presence_penalty", (-2.1, 2.1, math.nan, None, "1"), "a number in [-2, 2]"),
        ("frequency_penalty", (-2.1, 2.1, math.nan, None, "1"), "a number in [-2, 2]"),
        (
            "logit_bias",
            ({1: 101}, {1: -101.0}, {1: math.nan}, {-1: 0}, {"a": 1}, {1.5: 1}, {1: "x"}, [1], 5),
            "a mapping of token ids to numbers in [-100, 100]",
        ),
        (
            "bad_words",
            ("", " ", ["a", ""], [5], 5),
            "text with more than whitespace, or a list of such texts",
        ),
        (
            "allowed_token_ids",
            ([], [-1], ["a"], [1.0], 5, "5"),
            "a list of at least one integer >= 0",
        ),
        ("logprobs", (-1, 21, 1.0, True, "1"), "an integer in [0, 20]"),
        ("prompt_logprobs", (-1, 21, 1.0, True, "1"), "an integer in [0, 20]"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(
    name: str, values: tuple[Any, ...], rule: str
) -> None:
    for value in values:
        with pytest.raises(RequestError) as refusal:
            SamplingParams(**{name: value})
        assert str(refusal.value).startswith(f"{name}: must be {rule}, not ")


@pytest.mark.parametrize(
    "values",
    [
        {"n": 128},
        {"min_p": 0},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: 100, np.int64(3): -100}},
        {"bad_words": "one"},
        {"bad_words": ["one", "two"]},
        {"allowed_token_ids": [0]},
        {"logprobs": 20, "prompt_logprobs": 0},
    ],
    ids=str,
)
def test_the_bounds_of_each_range_are_allowed(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_lists_and_mappings_are_copied_and_json_keys_are_token_ids() -> None:
    bias, allowed = {"17": 1.5, 3: -2}, [4, 5]
    params = SamplingParams(
        logit_bias=bias,  # type: ignore[arg-type]
        allowed_token_ids=allowed,
        bad_words="bad",
    )
    bias.clear()
    allowed.clear()
    assert params.logit_bias == {17: 1.5, 3: -2}
    assert params.allowed_token_ids == (4, 5)
    assert params.bad_words == ("bad",)


def test_none_means_no_bias_and_no_bad_words() -> None:
    params = SamplingParams(logit_bias=None, bad_words=None)  # type: ignore[arg-type]
    assert params == SamplingParams()


def test_parameters_hash_and_pickle_by_value() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, bad_words=["a"], allowed_token_ids=[1])
    assert hash(params) == hash(replace(params))
    assert pickle.loads(pickle.dumps(params)) == params


def test_the_defaults_of_the_model_fill_only_unset_fields() -> None:
    defaults = GenerationDefaults(min_p=0.2, repetition_penalty=1.5)
    resolved = SamplingParams().resolve(defaults, seed=1)
    assert (resolved.min_p, resolved.repetition_penalty) == (0.2, 1.5)
    explicit = SamplingParams(min_p=0.0, repetition_penalty=1.0).resolve(defaults, seed=1)
    assert (explicit.min_p, explicit.repetition_penalty) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1.0}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_neutral_penalties_count_as_no_penalties(values: dict[str, Any], expected: bool) -> None:
    assert SamplingParams(**values).has_penalties is expected


def test_bans_are_added_to_those_of_the_model() -> None:
    bans = TokenBans(sequences=((1,),), first_token_ids=(2,))
    assert bans.add(()) is bans
    assert bans.add(((3, 4),)) == TokenBans(sequences=((1,), (3, 4)), first_token_ids=(2,))
