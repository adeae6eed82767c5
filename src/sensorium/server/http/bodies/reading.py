"""Reads the body of a request, and parses it, in a thread if it is large.

This module refuses bodies that are not JSON (400, with the position). Routes that take media as
bytes also accept msgpack. A request is admitted when its body is complete, so that a slow body does
not use up the limit of concurrent requests.

An unknown field is ignored, because clients send extra fields. A field that differs in one letter
from a known one is probably a mistake, so the headers of the response and the log name it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.http.bodies.decoding import MAX_VALUES, check_num_values, decode_json
from sensorium.server.http.bodies.intake import BodyIntake
from sensorium.server.http.errors import ApiError
from sensorium.types.checking import check

_SMALL_BYTES = 2**13  # so small that using a thread would take about as long as the work
# Few threads, because each may hold the interpreter's lock while it decodes, and the event loop
# waits for all of them.
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
    """Receive and decode the body of a request, and return the result of `parse` for it.

    `parse` may run in a thread, and may raise. Raise an `ApiError` if the body can't be read.
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
    """Return the type in a `Content-Type` header, without parameters; JSON if there is none."""
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
        raise _make_json_error("the body is empty: send a JSON object")
    try:
        value = decode_json(body)
    except UnicodeDecodeError as error:
        raise _make_json_error(f"the body is not valid UTF-8{_find_bad_byte(body)}") from error
    except msgspec.MsgspecError as error:
        raise _make_json_error(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise _make_json_error("the JSON of the body is nested too deeply") from error
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
        raise ApiError("the body must be a msgpack map with text as keys", code="invalid_msgpack")
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


def wants_msgpack(request: Request) -> bool:
    """Return whether the request's `Accept` header lists msgpack; if not, the response is JSON."""
    accepted = request.headers.get("accept", "")
    kinds = {entry.partition(";")[0].strip().lower() for entry in accepted.split(",")}
    return not kinds.isdisjoint(MSGPACK_TYPES)


def make_response(value: Any, *, is_msgpack: bool = False) -> Response:
    if is_msgpack:
        return Response(msgspec.msgpack.encode(value), media_type=MSGPACK_TYPES[0])
    return Response(msgspec.json.encode(value), media_type="application/json")


logger = logging.getLogger(__name__)
_MAX_WARNED = 1000  # bounded, because clients choose the names
_MAX_NAME_LENGTH = 100
_MAX_COMPARED = 16  # unknown fields of one request that are compared with known ones
_MIN_LENGTH = 4  # shorter names differ in one letter from too many others
_warned: set[str] = set()
_Request = TypeVar("_Request", bound=Struct)


def read_request(kind: type[_Request], body: dict[str, Any]) -> tuple[_Request, str | None]:
    """Return the checked request, and a warning about fields that are probably misspelt, or `None`.

    Unknown fields are ignored and logged. Raise a `RequestError` if the body does not fit `kind`.
    """
    request = check(body, kind)
    unknown = list(islice(_find_unknown(request, body), _MAX_COMPARED))
    for name, _ in unknown:
        _warn_once(name[:_MAX_NAME_LENGTH])  # cut, because names are kept and may be very long
    likely = ((name, _find_likely(name, known)) for name, known in unknown)
    hints = [f"unknown field {name!a}, did you mean '{known}'?" for name, known in likely if known]
    return request, "; ".join(hints) or None


def _find_unknown(request: Struct, body: dict[str, Any]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the name of each unknown field of a body, with the names that its object may have.

    Objects inside the body are searched, and their unknown fields are yielded without a path.
    """
    known = _get_names(type(request))
    for name, value in body.items():
        if name not in known:
            yield name, known
        elif isinstance(value, dict):
            inner = getattr(request, name)
            if isinstance(inner, Struct):
                yield from _find_unknown(inner, value)


@cache
def _get_names(kind: type[Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


def _find_likely(name: str, known: frozenset[str]) -> str | None:
    return next((other for other in sorted(known) if _is_letter_away(name, other)), None)


def _is_letter_away(name: str, other: str) -> bool:
    """Return whether two names differ in one letter, or in the order of two adjacent letters."""
    if min(len(name), len(other)) < _MIN_LENGTH or abs(len(name) - len(other)) > 1:
        return False
    pairs = enumerate(zip(name, other, strict=False))
    start = next((index for index, (a, b) in pairs if a != b), min(len(name), len(other)))
    name, other = name[start:], other[start:]
    is_swapped = name[:2] == other[:2][::-1] and name[2:] == other[2:]
    return name[1:] == other[1:] or name == other[1:] or name[1:] == other or is_swapped


def _warn_once(name: str) -> None:
    if name not in _warned and len(_warned) < _MAX_WARNED:
        _warned.add(name)
        logger.warning("requests have the unknown field %r, which is ignored", name)
