"""Steps that a thread makes ready."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from training.ahead import Ahead


def make_steps(count: int) -> Iterator[Any]:
    for number in range(count):
        yield {"seen": {"labels": np.full(3, number), "tasks": ["x"]}, "heard": {"size": (1, 2)}}
    raise ValueError("a worker failed")


def test_steps_come_in_order_as_tensors_and_an_error_after_them() -> None:
    ahead = Ahead(make_steps(5), lambda batch: {"media": torch.tensor(len(batch))}, "cpu")
    for number in range(5):
        batches, processed = next(ahead)
        assert torch.equal(batches[0]["labels"], torch.full((3,), number))
        assert batches[0]["tasks"] == ["x"]
        assert [media["media"].item() for media in processed] == [2, 1]
    with pytest.raises(ValueError, match="a worker failed"):
        next(ahead)
