"""The pages of the server: the welcome page at `/`, and the documentation at `/docs`.

The welcome page lets a visitor show the model a picture or a recording, ask about it, and see where
time went. If the model transcribes, the page shows the words of a recording at their times. The
documentation shows the OpenAPI document. Both are files that are read once, load nothing from
elsewhere, and use the routes that every client uses. The welcome page needs no key. Addresses in
the files are relative, because the server may stand behind a proxy, under a path. Browsers ask
every time whether a file has changed (`ETag`), so that a new version is never mixed with an old
one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_NAMES = {
    "/": "index.html",
    **{
        f"/welcome/{name}": name
        for name in (
            *("style.css", "welcome.js", "media.js", "speech.js", "live.js", "worklet.js"),
            *("trace.js", "icon.svg"),
        )
    },
}
WELCOME_PATHS = frozenset(_NAMES)  # they need no API key
# Path of a page, or of a file that a page loads -> the file.
PAGE_PATHS = {
    **_NAMES,
    "/docs": "docs.html",
    **{f"/docs/{name}": name for name in ("docs.css", "docs.js")},
}
# Pages load nothing from other hosts and send nothing to them. `blob:` and `data:` are files that
# the visitor has chosen. 'self' also allows WebSockets to this server.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "media-src blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A file of a web page, with its content type and the `ETag` that identifies its content."""

    content: bytes
    content_type: str
    etag: str

    def make_response(self, known: str) -> Response:
        """Return the file, or the status 304 if `known` (`If-None-Match`) has its tag."""
        headers = {**_HEADERS, "etag": self.etag}
        tags = {tag.strip().removeprefix("W/") for tag in known.split(",")}
        if tags & {self.etag, "*"}:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "content-type": self.content_type})


async def get_page(request: Request) -> Response:
    known = ",".join(request.headers.getlist("if-none-match"))
    return _read_page(PAGE_PATHS[request.scope["route"].path]).make_response(known)


@cache
def _read_page(name: str) -> Page:
    content = (files(__package__) / "files" / name).read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Page(content=content, content_type=_TYPES[name.rpartition(".")[2]], etag=etag)
