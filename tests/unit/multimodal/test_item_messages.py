"""Jobs as bytes: what can't be sent is reported as the caller's fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sensorium.multimodal.media import MediaBytes
from sensorium.multimodal.processing.item_backend import decode_job, encode_job
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.types.errors import RequestError


def encode(value: object) -> bytes:
    job = ItemJob(
        mm_hash="a", modality="image", decode_options=None, processor_kwargs={"option": value}
    )
    processor: Any = None  # only asked about media in process
    return encode_job(job, MediaBytes(b"file"), processor=processor, keep=False)[0]


@pytest.mark.parametrize("value", [np.zeros(2), 2**64, "\ud800", object()])
def test_options_that_are_no_plain_values_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match="plain"):
        encode(value)


def test_numbers_of_numpy_arrive_as_plain_ones() -> None:
    job, media, _ = decode_job(encode(np.float64(0.5)), memoryview(b"file"))
    assert type(job.processor_kwargs["option"]) is float
    assert (job.processor_kwargs, media) == ({"option": 0.5}, b"file")
