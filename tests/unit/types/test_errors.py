"""Errors keep their kind, their text and their place on the way to the caller."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import pytest

from sensorium.multimodal.fetching.fetch import RefusedMediaError
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    ErrorRecord,
    FailedRequestError,
    FieldPath,
    InvariantError,
    MediaFetchError,
    MissingMediaError,
    ModelError,
    RequestError,
    SensoriumError,
    at,
    format_path,
    make_record,
    map_at,
)

ERRORS = [
    RequestError("wrong"),
    ModelError("wrong"),
    MissingMediaError("wrong", ("a", "b")),
    RefusedMediaError("wrong", "address"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copied_error_keeps_all_its_fields(error: RequestError, duplicate: object) -> None:
    error.outputs = (1,)
    error.path = ("images", 0)
    own = duplicate(error)  # type: ignore[operator]
    assert type(own) is type(error)
    assert vars(own) == vars(error)
    assert str(own) == str(error) == "images[0]: wrong"
    own.path = ()
    assert str(own) == "wrong"
    assert error.path == ("images", 0)


def test_nested_at_blocks_extend_the_path_of_an_error() -> None:
    with pytest.raises(RequestError) as caught, at("messages", 3), at("content"):
        raise RequestError("odd", path=(1, "image_url"))
    assert caught.value.path == ("messages", 3, "content", 1, "image_url")
    assert str(caught.value) == "messages[3].content[1].image_url: odd"
    assert caught.value.message == "odd"


def test_other_errors_pass_through_at_unchanged() -> None:
    with pytest.raises(KeyError), at("messages"):
        raise KeyError("odd")
    with pytest.raises(CapacityError, match=r"^full$"), at("messages"):
        raise CapacityError("full")


def test_the_index_of_a_bad_entry_is_in_the_path() -> None:
    def read(entry: int) -> int:
        if entry < 0:
            raise RequestError("negative")
        return 2 * entry

    assert map_at(read, [1, 2]) == [2, 4]
    with pytest.raises(RequestError) as caught:
        map_at(read, [1, -2])
    assert caught.value.path == (1,)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), ""),
        (("prompt", 1, 0), "prompt[1][0]"),
        (("tools", 0, "function", "name"), "tools[0].function.name"),
        (("x" * 1000,), "x" * 200),
    ],
)
def test_paths_are_written_as_javascript_writes_them(path: FieldPath, text: str) -> None:
    assert format_path(path) == text


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("wrong", path=("messages", 0)), RequestError),
        (RefusedMediaError("wrong", "dns"), MediaFetchError),
        (FailedRequestError("wrong"), FailedRequestError),
        (MissingMediaError("wrong", ("a",), path=("features",)), MissingMediaError),
        (CapacityError("wrong", retry_after_s=7), CapacityError),
        (EngineLostError("wrong"), EngineLostError),
        (InvariantError("wrong"), InvariantError),
        (SensoriumError("wrong"), InvariantError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_crosses_processes(error: SensoriumError, kind: type[SensoriumError]) -> None:
    frame = msgspec.msgpack.encode(make_record(error))
    arrived = msgspec.msgpack.decode(frame, type=ErrorRecord).make_error()
    assert type(arrived) is kind
    assert str(arrived) == str(error)
    for name in ("path", "missing", "retry_after_s"):
        assert getattr(arrived, name, None) == getattr(error, name, None)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("half \ud800", path=("a\udfff", 3)),
        RequestError("x" * 10**6, path=("y" * 10**6,) * 1000),
        MissingMediaError("gone", ("\ud800", "z" * 10**6)),
        FailedRequestError(str(b"\xff".decode(errors="surrogateescape"))),
        CapacityError("full \ud800" * 10**5),
        InvariantError("odd \ud800"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_with_any_text_crosses_processes(error: SensoriumError) -> None:
    frame = msgspec.msgpack.encode(make_record(error))
    assert len(frame) < 40_000
    arrived = msgspec.msgpack.decode(frame, type=ErrorRecord).make_error()
    assert type(arrived) is type(error)
    assert str(arrived)[:3] == str(error).encode(errors="replace").decode()[:3]


@pytest.mark.parametrize(
    ("given", "sent"),
    [(7, 7), (1.2, 2), ("3", 3), (None, 1), ("soon", 1), (float("nan"), 1), (float("inf"), 1)],
)
def test_the_time_to_try_again_crosses_processes_as_an_integer(given: Any, sent: int) -> None:
    frame = msgspec.msgpack.encode(make_record(CapacityError("full", retry_after_s=given)))
    arrived = msgspec.msgpack.decode(frame, type=ErrorRecord).make_error()
    assert isinstance(arrived, CapacityError)
    assert arrived.retry_after_s == sent
