"""What a response's headers say about keeping it (RFC 9111, as a shared cache without guesses).

Headers are mappings from lower-case names to values. Nothing is fresh that doesn't say for how
long; requests are always sent with the same headers, so that any `Vary` but `*` is satisfied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

Headers = Mapping[str, str]

_DIRECTIVE = re.compile(r"""([\w-]+)(?:\s*=\s*(?:"([^"]*)"|([^\s,"]*)))?""")
_MAX_LIFETIME_S = 10 * 365 * 86400


def parse_cache_control(headers: Headers) -> dict[str, str]:
    """The first of each directive; `""` for one without a value."""
    directives: dict[str, str] = {}
    for name, quoted, plain in _DIRECTIVE.findall(headers.get("cache-control", "")):
        directives.setdefault(name.lower(), quoted or plain)
    return directives


def is_storable(headers: Headers) -> bool:
    directives = parse_cache_control(headers)
    if "no-store" in directives or "private" in directives:
        return False
    return "*" not in headers.get("vary", "")


def make_validators(headers: Headers) -> dict[str, str]:
    """The request headers that ask "still the same?"; none when the response has no name."""
    names = {"etag": "If-None-Match", "last-modified": "If-Modified-Since"}
    return {ask: headers[name] for name, ask in names.items() if headers.get(name)}


def compute_fresh_until(headers: Headers, now: float) -> float:
    """Until when a response that came at `now` may be used without asking."""
    directives = parse_cache_control(headers)
    if "no-cache" in directives:
        return now
    sent_at = _parse_date(headers.get("date"))
    sent_at = now if sent_at is None else sent_at
    age_s = max(_parse_seconds(headers.get("age", "0")), now - sent_at)
    return now + _compute_lifetime_s(headers, directives, sent_at) - age_s


def _compute_lifetime_s(headers: Headers, directives: Mapping[str, str], sent_at: float) -> float:
    for name in ("s-maxage", "max-age"):
        if name in directives:
            return _parse_seconds(directives[name])
    expires_at = _parse_date(headers.get("expires"))
    return 0 if expires_at is None else min(expires_at - sent_at, _MAX_LIFETIME_S)


def _parse_seconds(text: str) -> int:
    """What isn't a number of seconds is none."""
    text = text.strip()
    if not (text.isascii() and text.isdigit()):
        return 0
    return _MAX_LIFETIME_S if len(text) > 9 else min(int(text), _MAX_LIFETIME_S)


def _parse_date(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
