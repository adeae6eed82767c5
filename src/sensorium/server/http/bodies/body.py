"""Reads the body of a request, and parses it away from the event loop.

A body that is wrong is refused before anything else is done: too large (413) or too slow (408) by
`body_intake`, not JSON (400, with the place) here. Where media may come as bytes, it may be msgpack
instead. A request is admitted when its body is there: one that comes slowly takes no other's place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from sensorium.server.http.bodies.body_intake import BodyIntake
from sensorium.server.http.bodies.json_slices import MAX_VALUES, decode_json
from sensorium.server.http.bodies.msgpack_values import check_num_values
from sensorium.server.http.errors import ApiError

_SMALL_BYTES = 2**13  # decoded and checked in little more time than a thread takes to answer
# Few: each may keep the interpreter to itself while it decodes, and the event loop waits for all of
# them in turn.
_threads = ThreadPoolExecutor(2, "parse")
_Parsed = TypeVar("_Parsed")
MSGPACK_TYPES = ("application/x-msgpack", "application/msgpack", "application/vnd.msgpack")


async def read_body(
    request: Request,
    parse: Callable[[dict[str, Any]], _Parsed],
    *,
    intake: BodyIntake,
    takes_msgpack: bool = False,
) -> _Parsed:
    """`parse` makes of the body's object what the route wants; it runs where the body was decoded,
    and may raise.
    """
    kind = _get_content_type(request.headers.get("content-type"))
    is_msgpack = takes_msgpack and kind in MSGPACK_TYPES
    if not is_msgpack:
        _check_content_type(kind, takes_msgpack=takes_msgpack)
    decode = _decode_msgpack if is_msgpack else _decode
    intake.check_length(request.headers.get("content-length"))
    body = await intake.receive(request.receive)
    request.state.admit()
    if len(body) <= _SMALL_BYTES:
        return parse(decode(body))
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, lambda: parse(decode(body)))


def _get_content_type(value: str | None) -> str:
    """Without one it is taken for JSON."""
    return (value or "application/json").partition(";")[0].strip().lower()


def _check_content_type(kind: str, *, takes_msgpack: bool) -> None:
    if kind != "application/json" and not kind.endswith("+json"):
        others = f" or {MSGPACK_TYPES[0]}" if takes_msgpack else ""
        raise ApiError(
            f"the content type must be application/json{others}, not {kind[:100]!r}",
            code="unsupported_content_type",
        )


def _decode(body: bytearray) -> dict[str, Any]:
    if len(body) <= _SMALL_BYTES and not body.strip():
        raise _make_json_error("the body is empty")
    try:
        value = decode_json(body)
    except UnicodeDecodeError as error:
        raise _make_json_error(f"the body is not valid UTF-8{_find_bad_byte(body)}") from error
    except msgspec.MsgspecError as error:
        raise _make_json_error(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise _make_json_error("the body is nested too deeply") from error
    if not isinstance(value, dict):
        raise _make_json_error(f"the body must be a JSON object, not {_name_kind(value)}")
    return value


def _decode_msgpack(body: bytearray) -> dict[str, Any]:
    check_num_values(body, MAX_VALUES)
    try:
        value = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the body is not valid msgpack: {error}", code="invalid_msgpack") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ApiError("the body must be a msgpack map with names", code="invalid_msgpack")
    return value


def _find_bad_byte(body: bytearray) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f": byte {error.start} is {body[error.start]:#04x}"
    return ""


def _make_json_error(message: str) -> ApiError:
    return ApiError(message, code="invalid_json")


def _name_kind(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "true, false or null"
    return {list: "a list", str: "a string", int: "a number", float: "a number"}[type(value)]
