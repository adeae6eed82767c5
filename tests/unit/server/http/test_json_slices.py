"""Slices are decoded to what the whole is."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.server.http.bodies import decoding as json_slices
from sensorium.server.http.bodies.decoding import decode_json
from sensorium.types.errors import RequestError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet="ab,[{"), inner),
)


@pytest.fixture
def tiny_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_slices, "_MAX_VALUES_AT_ONCE", 0)
    monkeypatch.setattr(json_slices, "_FLAT_SLICE_BYTES", 3)
    monkeypatch.setattr(json_slices, "_BATCH_BYTES", 3)
    monkeypatch.setattr(json_slices, "_COUNT_BYTES", 7)


@given(value=VALUES, indent=st.sampled_from([None, 1]))
def test_any_value_is_the_same_in_slices(value: Any, indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_slices, "_MAX_VALUES_AT_ONCE", 0)
        patch.setattr(json_slices, "_FLAT_SLICE_BYTES", 3)
        patch.setattr(json_slices, "_BATCH_BYTES", 3)
        patch.setattr(json_slices, "_MAX_DEPTH", 100)
        text = json.dumps(value, indent=indent).encode()
        assert decode_json(text) == json.loads(text)


@pytest.mark.usefixtures("tiny_slices")
@pytest.mark.parametrize(
    "text",
    [b"[1,2,]", b"[1,,2]", b"[,1]", b"[1,2", b"[1,2]]", b"[1 2,3]", b'{"a":[1,2,],"b":1}', b"[1,}"],
)
def test_malformed_json_is_also_malformed_in_slices(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_json(text)


def test_a_long_list_of_numbers_is_decoded_in_slices_of_the_real_size() -> None:
    numbers = list(range(200_000))
    assert decode_json(json.dumps({"prompt": [numbers]}).encode()) == {"prompt": [numbers]}


def test_more_values_than_can_be_sliced_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_slices, "MAX_VALUES", 10)
    with pytest.raises(RequestError, match="more than 10 values"):
        decode_json(json.dumps([[]] * 12).encode())


def test_many_values_far_down_are_refused_as_each_level_is_read_again() -> None:
    numbers = ",".join(["1"] * 60_000)
    text = f'{{"prompt":{"[" * 400}{numbers}{"]" * 400}}}'.encode()
    with pytest.raises(RequestError, match="levels deep"):
        decode_json(text)


def test_small_values_are_decoded_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    decode = msgspec.json.decode

    def count(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return decode(*arguments, **options)

    monkeypatch.setattr(msgspec.json, "decode", count)
    words = ["a", "b"] * 50_000
    assert decode_json(json.dumps({"prompt": words}).encode()) == {"prompt": words}
    assert len(calls) < 50
