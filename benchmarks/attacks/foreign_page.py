"""Requests that a page of another origin can make a browser send, as browsers send them.

A server without a key can be reached by every page that its user opens. Such a page can't read the
answers, but it can make the model work, empty the caches, and, by a name that was made to lead to
the server, read everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

FLAGS: tuple[str, ...] = ()
CHAT = "/v1/chat/completions"
RESET = "/reset_mm_cache"
_BODY = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
_JSON = {"content-type": "application/json"}
_EVIL = {"origin": "https://evil.example"}
_CROSS = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", **_EVIL}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """One request of a page."""

    name: str
    path: str
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def send(self, url: str) -> httpx.Response:
        """Send it to the server at `url`."""
        return httpx.request(
            self.method,
            url.rstrip("/") + self.path,
            headers=self.headers,
            content=self.body,
            timeout=120,
        )


REQUESTS = (
    PageRequest(name="a reset by fetch", path=RESET, headers=_CROSS),
    PageRequest(name="a reset by an old browser", path=RESET, headers=_EVIL),
    PageRequest(name="a reset by a form of a file", path=RESET, headers={"origin": "null"}),
    PageRequest(
        name="a form of another site",
        path=RESET,
        headers={**_EVIL, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    ),
    PageRequest(
        name="a page on another port of this machine",
        path=RESET,
        headers={"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    ),
    PageRequest(name="a chat of no type by fetch", path=CHAT, headers=_CROSS, body=_BODY),
    PageRequest(name="a body of no type", path=CHAT, body=_BODY),
    PageRequest(name="a body of no type to a reset", path=RESET, body=b"{}"),
    PageRequest(
        name="a chat as text", path=CHAT, headers={"content-type": "text/plain"}, body=_BODY
    ),
    PageRequest(name="a chat with its type", path=CHAT, headers={**_JSON, **_CROSS}, body=_BODY),
    PageRequest(
        name="a question before it",
        method="OPTIONS",
        path=CHAT,
        headers={**_EVIL, "access-control-request-method": "POST"},
    ),
    PageRequest(name="metrics by fetch", method="GET", path="/metrics", headers=_EVIL),
    PageRequest(
        name="the page in a frame",
        method="GET",
        path="/",
        headers={
            "sec-fetch-site": "cross-site",
            "sec-fetch-mode": "navigate",
            "sec-fetch-dest": "iframe",
        },
    ),
    PageRequest(
        name="a name that was made to lead here",
        path=CHAT,
        headers={
            **_JSON,
            "host": "evil.example:8000",
            "origin": "http://evil.example:8000",
            "sec-fetch-site": "same-origin",
        },
        body=_BODY,
    ),
    PageRequest(
        name="models by such a name",
        method="GET",
        path="/v1/models",
        headers={"host": "evil.example"},
    ),
)


@contextmanager
def attack(url: str) -> Iterator[list[int]]:
    """Send all of them once. The list holds the answers' statuses."""
    yield [request.send(url).status_code for request in REQUESTS]
