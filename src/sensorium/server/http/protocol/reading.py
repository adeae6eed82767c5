"""From the object of a body to a request, with the first mistake named by its path."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from pydantic import ValidationError

from sensorium.server.http.errors import ApiError
from sensorium.server.http.protocol.generating import GeneratingRequest, WireModel

logger = logging.getLogger(__name__)
_MAX_WARNED = 1000  # names come from clients
_MAX_NAME_LENGTH = 100
_warned: set[str] = set()
_Request = TypeVar("_Request", bound=GeneratingRequest)
_Model = TypeVar("_Model", bound=WireModel)


def read_request(kind: type[_Request], body: dict[str, Any]) -> _Request:
    request = read_model(kind, body)
    if request.stream_options is not None:
        _warn_of_unknown(request.stream_options)
    return request


def read_model(kind: type[_Model], body: dict[str, Any]) -> _Model:
    """Of any shape."""
    try:
        model = kind.model_validate(body)
    except ValidationError as error:
        raise _make_error(error) from error
    _warn_of_unknown(model)
    return model


def _make_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = format_path(first["loc"])
    message = first["msg"]
    return ApiError(f"{path}: {message[:1].lower()}{message[1:]}", param=path)


def format_path(location: tuple[int | str, ...]) -> str:
    """As in `stream_options.include_usage` or `stop[1]`."""
    path = ""
    for entry in location:
        if entry == "[key]":  # of a mapping; the key itself stands before it
            continue
        path += f"[{entry}]" if isinstance(entry, int) else f".{entry}"
    return path.removeprefix(".")[:200]


def _warn_of_unknown(request: WireModel) -> None:
    """Once per name, and process."""
    for full_name in request.model_extra or ():
        name = full_name[:_MAX_NAME_LENGTH]  # kept: a name may be as long as a body
        if name not in _warned and len(_warned) < _MAX_WARNED:
            _warned.add(name)
            logger.warning("requests have the unknown field %r, which is ignored", name)
