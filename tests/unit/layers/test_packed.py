"""Attention inside packed sequences."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sensorium.layers.attention.packed import (
    PackedLengths,
    attend_in_batches,
    choose_packed_kernel,
)


def _pack(lengths: list[int]) -> PackedLengths:
    starts = [0, *accumulate(lengths)]
    return PackedLengths.from_starts(torch.tensor(starts), torch.tensor(starts))


@pytest.mark.parametrize("lengths", [[7], [4, 4, 4], [3, 9, 3, 1, 9], [0, 5, 0, 2]])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_each_sequence_attends_to_itself(lengths: list[int], scaling: float | None) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, sum(lengths), 8)
    found = attend_in_batches(query, key, value, _pack(lengths), scaling)

    starts = [0, *accumulate(lengths)]
    for start, end in pairwise(starts):
        part = slice(start, end)
        expected = scaled_dot_product_attention(
            query[:, :, part], key[:, :, part], value[:, :, part], scale=scaling
        )
        torch.testing.assert_close(found[:, part], expected.transpose(1, 2))


def test_on_a_cpu_there_is_no_varlen_kernel() -> None:
    assert choose_packed_kernel(torch.device("cpu"), torch.float32, 8) is attend_in_batches
