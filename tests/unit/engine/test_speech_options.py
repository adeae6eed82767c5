"""The options of `LLM.transcribe`: a value that no model can take is refused by its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sensorium.engine.speech.batch import make_options
from sensorium.types.errors import RequestError

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
