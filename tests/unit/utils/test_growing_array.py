"""An array that grows by appending and reads like a list."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.utils.growing_array import GrowingArray

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
