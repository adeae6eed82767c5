"""Reads the address of a Redis, and shows it without its password.

A misspelt address may contain its password in any of its parts. So no error here repeats any part
of the address.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, urlsplit

from sensorium.types.errors import ModelError

_NUMBER = re.compile("[0-9]{1,9}")  # of a database
_REFUSAL = (
    "mm_remote_cache is no address of a Redis: use redis://HOST:PORT/DB, rediss://HOST:PORT/DB "
    "for TLS, or unix:///PATH. In a password, write characters such as / ? # @ % as %2F %3F %23 "
    "%40 %25. The address is not repeated here, because it may contain a password."
)
# The options that may follow a question mark. `RedisStore` sets all others, such as timeouts.
_LOGIN = frozenset({"db", "username", "password"})
_TLS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAddress:
    """The address of a Redis. Its text is safe to print, its `url` is not."""

    url: str = field(repr=False)
    shown: str  # without the name of the user and the password

    def __str__(self) -> str:
        return self.shown


def parse_address(url: str) -> RemoteAddress:
    """Check the address of a Redis; raise a `ModelError` that does not repeat it."""
    try:
        parts = urlsplit(url)
        shown = _show(parts)
        has_known_query = _has_known_query(parts)
    except ValueError:
        shown, has_known_query = None, False
    if shown is None or not has_known_query:
        raise ModelError(_REFUSAL)
    return RemoteAddress(url=url, shown=shown)


def _has_known_query(parts: SplitResult) -> bool:
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = _LOGIN | _TLS if parts.scheme == "rediss" else _LOGIN
    is_number = _NUMBER.fullmatch(query.get("db", "0")) is not None
    return not parts.fragment and query.keys() <= known and is_number


def _show(parts: SplitResult) -> str | None:
    """Return the address without its secrets, or None or a `ValueError` if it is invalid."""
    if parts.scheme == "unix":
        is_usable = parts.path.startswith("/") and len(parts.path) > 1 and not parts.hostname
        return f"unix://{parts.path}" if is_usable else None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.port == 0:
        return None
    if parts.path not in ("", "/") and not _NUMBER.fullmatch(parts.path.removeprefix("/")):
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"
