"""The fields of a prompt become items of media."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sensorium.engine.inputs.prompt_fields import get_media_items, normalise
from sensorium.types.errors import RequestError


@pytest.mark.parametrize("rate", [16_000, 16_000.0, np.int64(16_000), np.float32(16_000)])
def test_samples_beside_their_rate_are_one_sound(rate: Any) -> None:
    sound = (np.zeros(4, dtype=np.float32), rate)
    items = get_media_items({"multi_modal_data": {"audio": sound}})
    assert [item.media for item in items] == [sound]


def test_token_ids_that_cannot_fit_are_refused_unseen() -> None:
    with pytest.raises(RequestError, match="the prompt has 8 tokens, but the context holds 8"):
        normalise(["no id"] * 8, max_model_len=8)  # type: ignore[arg-type]
    assert normalise([1] * 7, max_model_len=8) == {"prompt_token_ids": [1] * 7}
