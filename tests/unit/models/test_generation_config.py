"""The defaults of a model are those of its `generate`, or it is said that they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from sensorium.models.generation_config import get_generation_defaults
from sensorium.types.errors import ModelError
from sensorium.types.sampling import GenerationDefaults, TokenBans


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"do_sample": False, "temperature": None, "eos_token_id": 2},
            GenerationDefaults(temperature=0.0, eos_token_ids=(2,)),
        ),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
            GenerationDefaults(temperature=0.7, top_p=0.8, top_k=20),
        ),
        (
            {"do_sample": True, "eos_token_id": [4, 5], "top_k": 0},
            GenerationDefaults(temperature=1.0, eos_token_ids=(4, 5)),
        ),
        ({}, GenerationDefaults(temperature=0.0)),
        (
            {"do_sample": None, "eos_token_id": 0},
            GenerationDefaults(temperature=0.0, eos_token_ids=(0,)),
        ),
    ],
)
def test_the_generation_config_is_the_default(
    config: dict[str, Any], expected: GenerationDefaults
) -> None:
    model = SimpleNamespace(generation_config=GenerationConfig(**config))
    assert get_generation_defaults(model) == expected  # type: ignore[arg-type]


def test_none_takes_only_the_end_of_sequence_from_a_generation_config(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = GenerationConfig(
        do_sample=True,
        temperature=0.3,
        top_p=0.8,
        top_k=20,
        min_p=0.1,
        repetition_penalty=1.3,
        suppress_tokens=[7],
        begin_suppress_tokens=[9],
        bad_words_ids=[[3]],
        no_repeat_ngram_size=3,
        eos_token_id=[2, 4],
    )
    model: Any = SimpleNamespace(generation_config=config)
    assert get_generation_defaults(model, "none") == GenerationDefaults(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, eos_token_ids=(2, 4)
    )
    assert caplog.text == ""


@pytest.mark.parametrize("eos", ["2", [-1]])
def test_without_a_generation_config_its_end_of_sequence_is_still_checked(eos: object) -> None:
    model: Any = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))
    with pytest.raises(ModelError, match=r"generation_config.json is wrong: eos_token_id: must be"):
        get_generation_defaults(model, "none")


def get_defaults(**config: Any) -> GenerationDefaults:
    model = SimpleNamespace(generation_config=GenerationConfig(**config))
    return get_generation_defaults(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("do_sample", [False, True])
def test_penalties_and_bans_also_apply_to_greedy_requests(do_sample: bool) -> None:
    defaults = get_defaults(
        do_sample=do_sample,
        repetition_penalty=1.3,
        suppress_tokens=[7, 8],
        begin_suppress_tokens=[9],
        bad_words_ids=[[3], [4, 5], [2], [2, 6]],
        eos_token_id=2,
    )
    assert defaults.repetition_penalty == 1.3
    # As in Transformers, end-of-sequence is no bad word.
    assert defaults.bans == TokenBans(
        sequences=((7,), (8,), (3,), (4, 5), (2, 6)), first_token_ids=(9,)
    )


@pytest.mark.parametrize(("do_sample", "expected"), [(False, 0.0), (True, 0.2)])
def test_min_p_is_for_sampled_requests_only(do_sample: bool, expected: float) -> None:
    assert get_defaults(do_sample=do_sample, min_p=0.2).min_p == expected


@pytest.mark.parametrize(
    "field", [{"no_repeat_ngram_size": 3}, {"min_new_tokens": 4}, {"num_beams": 2}]
)
def test_unsupported_settings_are_logged(
    field: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ((name, value),) = field.items()
    get_defaults(**field)
    assert f"{name}={value} is not supported" in caplog.text


def test_settings_without_effect_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    get_defaults(do_sample=True, typical_p=1.0, num_beams=1, min_length=0, suppress_tokens=[])
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("top_p", 2.0, "top_p: must be"),
        ("temperature", -1.0, "temperature: must be"),
        ("top_k", 5.5, "top_k: must be"),
        ("eos_token_id", "2", "stop_token_ids: must be"),
        ("eos_token_id", [-1], "stop_token_ids: must be"),
        ("min_p", 1.5, "min_p: must be"),
        ("repetition_penalty", 0.0, "repetition_penalty: must be"),
        ("suppress_tokens", ["a"], "suppress_tokens: must be"),
        ("begin_suppress_tokens", [-1], "begin_suppress_tokens: must be"),
        ("bad_words_ids", [3], "bad_words_ids: must be"),
        ("bad_words_ids", [[]], "bad_words_ids: must be"),
    ],
)
def test_a_generation_config_that_no_request_could_follow_is_refused_at_load(
    name: str, value: object, message: str
) -> None:
    config = SimpleNamespace(
        do_sample=True, temperature=None, top_p=None, top_k=None, eos_token_id=None
    )
    setattr(config, name, value)
    with pytest.raises(ModelError, match=f"generation_config.json is wrong: {message}"):
        get_generation_defaults(SimpleNamespace(generation_config=config))  # type: ignore[arg-type]
