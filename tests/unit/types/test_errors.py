"""Errors keep their kind and what they know on their way to the caller."""

from __future__ import annotations

import pytest

from sensorium.multimodal.fetching.fetch import RefusedMediaError
from sensorium.types.errors import MissingMediaError, ModelError, RequestError, add_label


@pytest.mark.parametrize(
    "error",
    [
        RequestError("wrong"),
        ModelError("wrong"),
        MissingMediaError("wrong", ("a", "b")),
        RefusedMediaError("wrong", "address"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_label_changes_nothing_but_the_text(error: RequestError) -> None:
    error.outputs = (1,)
    labelled = add_label(error, "image 0")
    assert type(labelled) is type(error)
    assert str(labelled) == "image 0: wrong"
    assert str(add_label(labelled, None)) == "image 0: wrong"
    assert vars(labelled) == vars(error)
    assert str(error) == "wrong"
