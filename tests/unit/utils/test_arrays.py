"""An array grows by appending and reads like a list; copies to a device keep the values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.utils.arrays import GrowingArray, to_device

integers = st.integers(-(2**63), 2**63 - 1)


@given(initial=st.lists(integers, max_size=5), parts=st.lists(st.lists(integers, max_size=20)))
@settings(deadline=None)
def test_it_holds_what_a_list_would_hold(initial: list[int], parts: list[list[int]]) -> None:
    array, expected = GrowingArray(initial), list(initial)
    for part in parts:
        array.extend(part)
        expected.extend(part)
        assert array.values.tolist() == expected
        assert len(array) == len(expected)


def test_values_are_int64_and_no_copy() -> None:
    array = GrowingArray((1, 2))
    assert array.values.dtype == np.int64
    assert np.shares_memory(array.values, array.values)
    assert GrowingArray().values.dtype == np.int64


def test_appending_one_at_a_time_rarely_moves_the_memory() -> None:
    array = GrowingArray()
    addresses = set()
    for value in range(1000):
        array.extend((value,))
        addresses.add(array.values.__array_interface__["data"][0])
    assert len(addresses) <= 8


def test_on_a_cpu_a_tensor_stays_as_it_is() -> None:
    tensor = torch.arange(5)
    assert to_device(tensor, torch.device("cpu")) is tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_to_a_gpu_do_not_wait_and_are_not_overwritten() -> None:
    device = torch.device("cuda")
    to_device(torch.arange(4096), device)  # first uses
    torch.cuda.set_sync_debug_mode("error")
    try:
        copies = [to_device(torch.full((4096,), index), device) for index in range(64)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for index, copy in enumerate(copies):
        assert copy.eq(index).all()
