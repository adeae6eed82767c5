"""Values of msgpack are counted as they are decoded, without decoding them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.server.http.bodies.decoding import check_num_values
from sensorium.types.errors import RequestError

NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=40) | st.binary(max_size=300)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + count(entry) for entry in value.values())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@given(value=VALUES)
def test_every_value_is_counted(value: Any) -> None:
    text = bytearray(msgspec.msgpack.encode(value))
    number = count(value)
    check_num_values(text, number)
    if number > 1 and len(text) > number - 1:
        with pytest.raises(RequestError, match="more than"):
            check_num_values(text, number - 1)


@pytest.mark.parametrize("size", [2**8, 2**16, 2**17])
def test_long_values_count_once(size: int) -> None:
    for value in (bytes(size), "x" * size, msgspec.msgpack.Ext(5, bytes(size))):
        check_num_values(bytearray(msgspec.msgpack.encode([value, value])), 3)


@pytest.mark.parametrize("text", [b"\xc6\xff", b"\xdf", b"\xc1" * 9, b"\xc9\x00\x00\x00"])
def test_truncated_data_is_left_to_the_decoder(text: bytes) -> None:
    check_num_values(bytearray(text), 9)


def test_a_body_of_empty_lists_is_refused_before_it_is_made() -> None:
    with pytest.raises(RequestError, match="more than 1000 values"):
        check_num_values(bytearray(b"\x90" * 5000), 1000)
