"""An answer in the encoding that the client asks for: JSON, or msgpack where media may be in it."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.http.bodies.body import MSGPACK_TYPES


def wants_msgpack(request: Request) -> bool:
    """By the `Accept` header; JSON where it says nothing of it."""
    accepted = request.headers.get("accept", "")
    kinds = {entry.partition(";")[0].strip().lower() for entry in accepted.split(",")}
    return not kinds.isdisjoint(MSGPACK_TYPES)


def make_response(value: Any, *, is_msgpack: bool = False) -> Response:
    if is_msgpack:
        return Response(msgspec.msgpack.encode(value), media_type=MSGPACK_TYPES[0])
    return Response(msgspec.json.encode(value), media_type="application/json")
