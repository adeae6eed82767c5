"""What is wrong with a value from outside is said in plain words, and at its place."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct

from sensorium.types.checking import check
from sensorium.types.errors import FieldPath, RequestError, UnknownFieldError


class Inner(Struct):
    offset: Annotated[int, Meta(ge=0)]


class Outer(Struct, kw_only=True):
    n: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    share: Annotated[float, Meta(le=1)] | None = None
    is_set: bool | None = None
    texts: Annotated[list[str], Meta(max_length=2)] | str | None = None
    ids: Annotated[list[int], Meta(min_length=1)] | None = None
    biases: dict[Annotated[str, Meta(pattern="^[0-9]$")], float] | None = None
    groups: dict[str, list[Inner]] | None = None
    free: Any = None


MISTAKES: list[tuple[dict[str, Any], FieldPath, str]] = [
    ({"n": "1"}, ("n",), "must be an integer, not text"),
    ({"n": 1.5}, ("n",), "must be an integer, not a fraction"),
    ({"n": True}, ("n",), "must be an integer, not true or false"),
    ({"n": 0}, ("n",), "must be at least 1"),
    ({"n": 1e30}, ("n",), "must be at most 9223372036854775807"),
    ({"share": 2}, ("share",), "must be at most 1"),
    ({"is_set": 1}, ("is_set",), "must be true or false, not a number"),
    ({"texts": 5}, ("texts",), "must be text or a list, not a number"),
    ({"texts": ["a", None]}, ("texts", 1), "must be text, not null"),
    ({"texts": ["a"] * 3}, ("texts",), "must have at most 2 entries"),
    ({"ids": []}, ("ids",), "must not be empty"),
    ({"ids": [1.0, "2"]}, ("ids", 1), "must be an integer, not text"),
    ({"biases": {"1": 1, "x": 1}}, ("biases", "x"), "must match '^[0-9]$'"),
    ({"biases": {"1": 1, "2": "a"}}, ("biases", "2"), "must be a number, not text"),
    ({"groups": {"a": [], "b": [{"offset": 1.0}, {}]}}, ("groups", "b", 1, "offset"), "is missing"),
    ({"groups": {"a": [{"offset": -1}]}}, ("groups", "a", 0, "offset"), "must be at least 0"),
    ({"groups": {"a": 5}}, ("groups", "a"), "must be a list, not a number"),
    # Keys of other types come with msgpack.
    ({"groups": {"a": [{1: 2}]}}, ("groups", "a", 0, "1"), "must be text"),
    ({1: 2}, ("1",), "must be text"),
]


@pytest.mark.parametrize(("value", "path", "message"), MISTAKES)
def test_the_first_mistake_is_named(value: dict[str, Any], path: FieldPath, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        check(value, Outer)
    assert (caught.value.path, caught.value.message) == (path, message)


def test_whole_numbers_are_integers_where_these_are_wanted_and_nowhere_else() -> None:
    given = {"n": 2.0, "ids": [1.0, 2], "groups": {"a": [{"offset": 3.0}]}, "free": {"x": 1.0}}
    checked = check(given, Outer)
    assert (checked.n, checked.ids, checked.groups) == (2, [1, 2], {"a": [Inner(3)]})
    assert type(checked.free["x"]) is float


def test_unknown_fields_are_left_out() -> None:
    assert check({"other": 1, "n": 1}, Outer) == Outer(n=1)


class Strict(Struct, forbid_unknown_fields=True):
    name: str = ""


class Holder(Struct):
    entries: list[Strict] = []
    table: dict[str, Strict] = {}
    one: Strict | None = None


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"one": {"nam": ""}}, ("one", "nam")),
        ({"more": 1, "entries": [{}, {"x": 1}]}, ("entries", 1, "x")),
        ({"table": {"a": {}, "b": {"x` - at `$.y": 1}}}, ("table", "b", "x` - at `$.y")),
    ],
)
def test_an_unknown_field_is_named_where_none_may_be(value: Any, path: FieldPath) -> None:
    with pytest.raises(UnknownFieldError) as caught:
        check(value, Holder)
    assert caught.value.path == path
