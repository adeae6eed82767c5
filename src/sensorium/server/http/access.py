"""Checks API keys, and refuses requests that a web page of another origin makes a browser send.

A browser on the server's machine or in its network can reach the server, and any web page can make
the browser send requests. The headers of a request show where it comes from, and pages can't change
them:

  1. `Host` is the name that the page used. A foreign name that leads to this server is an attack
     (DNS rebinding). A server that listens on this machine alone has few names, so all other names
     are refused. Any other server accepts every name, unless options list its names.
  2. `Sec-Fetch-Site` shows whether the page has the origin of this server; browsers that don't send
     it send `Origin`. Requests from pages of other origins are refused, even of the same site.
     Following a link to this server is allowed.
  3. A body needs a content type. Without asking for permission (CORS), a page of another origin may
     send bodies of a few types, or without a type. Of these types only forms are accepted, by the
     routes for speech.

A request with neither `Sec-Fetch-Site` nor `Origin` is assumed not to come from a web page. The
same checks apply to every route, with or without an API key, and to upgrades to WebSockets.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sensorium.server.http.errors import ApiError
from sensorium.server.http.welcome import WELCOME_PATHS

_ANY = "*"
_OWN_SITES = ("same-origin", "none")  # "none": typed into the address bar, or a bookmark
_VISITS = ("GET", "HEAD")


class OriginPolicy:
    """A check of whether a web page of a foreign origin may have sent a request.

    Pages of the server's own origin and of `allowed_origins` may send requests. If `host`, the
    address that the server listens on, is a loopback address, or if there are `allowed_hosts`,
    requests to other host names are refused. "*" allows every host or origin.
    """

    def __init__(
        self, *, host: str, allowed_hosts: Sequence[str] = (), allowed_origins: Sequence[str] = ()
    ) -> None:
        names = {_get_name(name) for name in allowed_hosts}
        is_open = _ANY in allowed_hosts or not (names or _is_loopback(_get_name(host)))
        self._names = None if is_open else frozenset(names | {_get_name(host)})
        self._origins = frozenset(origin.rstrip("/").lower() for origin in allowed_origins)

    def check(self, scope: Scope) -> None:
        """Raise an `ApiError` if a foreign page may have sent a request, or its host is refused."""
        headers = Headers(scope=scope)
        for host in headers.getlist("host"):
            self._check_host(host)
        if self._is_foreign(headers) and not _is_visit(scope, headers):
            origin = headers.get("origin")
            origin = "another site" if origin is None else repr(origin[:200])
            raise ApiError(
                f"This request comes from a web page of {origin}, which this server does not "
                "allow. The server's option --allowed-origins adds origins that it allows.",
                status=403,
                code="origin_not_allowed",
                reason="unauthorized",
            )

    def _check_host(self, host: str) -> None:
        name = _get_name(host)
        if self._names is not None and not _is_loopback(name) and name not in self._names:
            raise ApiError(
                f"The request's Host header is {name[:200]!r}, which is not a name of this server. "
                "The server's option --allowed-hosts adds names that it accepts.",
                status=403,
                code="host_not_allowed",
                reason="unauthorized",
            )

    def _is_foreign(self, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if _ANY in self._origins or (origin is not None and origin.lower() in self._origins):
            return False
        if site is not None:
            return site not in _OWN_SITES
        return origin is not None and not _is_own_page(origin, headers.get("host", ""))


class OriginGuard:
    """ASGI middleware that refuses requests of foreign origins, and bodies without content type."""

    def __init__(self, app: ASGIApp, *, policy: OriginPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            self._policy.check(scope)
        if scope["type"] == "http":
            _check_content_type(Headers(scope=scope))
        await self._app(scope, receive, send)


def _is_loopback(name: str) -> bool:
    """Return whether a host name or an IP address always refers to this machine itself."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _check_content_type(headers: Headers) -> None:
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if has_body and not headers.get("content-type", "").strip():
        raise ApiError(
            "The body has no content type. Send the header Content-Type: application/json.",
            code="unsupported_content_type",
        )


def _is_visit(scope: Scope, headers: Headers) -> bool:
    """Return whether a browser sent a request to show a page, as after a click on a link."""
    is_page = headers.get("sec-fetch-dest", "document") == "document"
    is_navigation = headers.get("sec-fetch-mode") == "navigate"
    return scope["type"] == "http" and scope["method"] in _VISITS and is_navigation and is_page


def _is_own_page(origin: str, host: str) -> bool:
    """Return whether the `Origin` header of a request has the same host as its `Host` header.

    Schemes are not compared, because a proxy may use https in front of a server that uses http.
    """
    try:
        page_host = urlsplit(origin).netloc
    except ValueError:
        return False
    return page_host != "" and page_host.lower() == host.lower()


def _get_name(host: str) -> str:
    """Return a host name or IP address in lower case, without its port and brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host if host.count(":") > 1 else host.partition(":")[0]
    return name.rstrip(".")


_OPEN_PATHS = WELCOME_PATHS | {"/health", "/ping", "/version"}
METRICS_PATH = "/metrics"
_KEY_PROTOCOL = "openai-insecure-api-key."


class Authentication:
    """ASGI middleware that refuses requests and WebSockets that have none of the API keys.

    A few paths, such as `/health`, need no key. Clients with different keys don't share the uuids
    of media items: unless `shares_uuids`, a digest of the key becomes the `uuid_scope` of the
    request's state. A page in a browser can't set headers of a WebSocket, so it may offer the key
    as a subprotocol, as OpenAI's clients do.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[str], protect_metrics: bool, shares_uuids: bool
    ) -> None:
        self._app = app
        self._scopes = {key.encode(): _make_scope(key.encode()) for key in keys}
        self._shares_uuids = shares_uuids
        self._open_paths = _OPEN_PATHS if protect_metrics else _OPEN_PATHS | {METRICS_PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            self._let_in(scope)
        await self._app(scope, receive, send)

    def _let_in(self, scope: Scope) -> None:
        given = _find_key(scope)
        found = None if given is None else self._find_scope(given)
        if found is not None:
            if not self._shares_uuids:
                scope["state"]["uuid_scope"] = found
        elif scope.get("method") != "OPTIONS" and scope["path"] not in self._open_paths:
            raise ApiError(
                "this server needs an API key: send the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                reason="unauthorized",
                headers={"www-authenticate": "Bearer"},
            )

    def _find_scope(self, given: str) -> str | None:
        """Return the uuid scope (a digest) of an API key, or `None` if the key is not valid.

        All keys are compared, so that the time does not depend on which one is equal.
        """
        raw = given.encode("latin-1")  # the bytes that were sent: servers decode headers as latin-1
        matches = [own for key, own in self._scopes.items() if hmac.compare_digest(raw, key)]
        return matches[0] if matches else None


def _find_key(scope: Scope) -> str | None:
    headers = Headers(scope=scope)
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        # Not all whitespace: a byte of a key may be a no-break space in latin-1.
        return given.strip(" \t")
    if scope["type"] == "websocket":
        offered = ",".join(headers.getlist("sec-websocket-protocol")).split(",")
        for each in offered:
            if each.strip(" \t").startswith(_KEY_PROTOCOL):
                return each.strip(" \t").removeprefix(_KEY_PROTOCOL)
    return None


def _make_scope(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=16, person=b"uuid-scope").hexdigest()
