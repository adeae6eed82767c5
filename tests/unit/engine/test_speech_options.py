"""The options of `LLM.transcribe`: which values are refused, and what they hold for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sensorium.engine.speech.audio import make_params
from sensorium.engine.speech.batch import make_options
from sensorium.speech.options import SpeechOptions
from sensorium.speech.windows import WindowRequest
from sensorium.types.errors import RequestError
from sensorium.types.sampling import NO_BANS, SamplingParams

MODEL: Any = SimpleNamespace(has_words=True, has_segments=True, can_translate=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", 5),
        ("prompt", None),
        ("prompt", "\ud800"),
        ("language", 7),
        ("language", "\udcff"),
        ("task", "sing"),
        ("temperature", "hot"),
    ],
)
def test_a_value_that_no_model_can_take_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        make_options({name: value}, MODEL)
    assert caught.value.path == (name,)


def test_other_values_are_options() -> None:
    given = {"prompt": "Ada, 😀", "language": "de", "task": "translate", "temperature": 1}
    options = make_options(given, MODEL)
    assert {name: getattr(options, name) for name in given} == given
    assert make_options({"language": None, "temperature": None}, MODEL).prompt == ""


def test_sampling_parameters_of_a_caller_are_for_text_only() -> None:
    sampling = SamplingParams(bad_words="en", logit_bias={7: 50.0}, top_k=3)
    options = SpeechOptions(sampling=sampling)
    text = WindowRequest(first_frame=0, num_frames=1, prompt_token_ids=(1,), max_tokens=5)
    assert make_params(text, options).logit_bias == {7: 50.0}
    language = make_params(replace(text, bans=NO_BANS, allowed=(7, 8)), options)
    assert (language.bad_words, language.logit_bias, language.top_k) == ((), {}, None)
    assert language.allowed_token_ids == (7, 8)
    assert language.speech is not None
    assert language.speech.bans == NO_BANS
