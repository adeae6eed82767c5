"""Errors keep what they know when they are said of something."""

from __future__ import annotations

import pytest

from sensorium.multimodal.media.refusal import RefusedMediaError
from sensorium.types.errors import MissingMediaError, RequestError, add_label


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (RequestError("why"), {}),
        (MissingMediaError("why", ("a",)), {"missing": ("a",)}),
        (RefusedMediaError("why", "address"), {"reason": "address"}),
    ],
)
def test_a_labelled_error_is_of_its_kind_and_knows_what_it_knew(
    error: RequestError, known: dict[str, object]
) -> None:
    labelled = add_label(error, "image 0")
    assert type(labelled) is type(error)
    assert str(labelled) == "image 0: why"
    assert vars(labelled) == known
