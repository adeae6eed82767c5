"""Makes a request of the object of a body, and finds the fields of it that are unknown.

An unknown field is ignored, because clients send extras. One that is a letter away from a known
field is probably a mistake: the answer's headers and the log name it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any, TypeVar

from msgspec import Struct

from sensorium.types.checking import check

logger = logging.getLogger(__name__)
_MAX_WARNED = 1000  # names come from clients
_MAX_NAME_LENGTH = 100
_MAX_COMPARED = 16  # unknown fields of one request
_MIN_LENGTH = 4  # shorter names are a letter away from too many others
_warned: set[str] = set()
_Request = TypeVar("_Request", bound=Struct)


def read_request(kind: type[_Request], body: dict[str, Any]) -> tuple[_Request, str | None]:
    """Return a request, and a warning if one of its fields is probably misspelt."""
    request = check(body, kind)
    unknown = list(islice(_find_unknown(request, body), _MAX_COMPARED))
    for name, _ in unknown:
        _warn_once(name[:_MAX_NAME_LENGTH])  # kept: a name may be as long as a body
    likely = ((name, _find_likely(name, known)) for name, known in unknown)
    hints = [f"unknown field {name!a}, did you mean '{known}'?" for name, known in likely if known]
    return request, "; ".join(hints) or None


def _find_unknown(request: Struct, body: dict[str, Any]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the names of unknown fields, with those that are known at that place."""
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
    """Return whether one letter was added, left out or changed, or two were swapped."""
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
