"""Reads http(s) URLs into one spelling.

Whatever is checked and connected to comes from the `httpx.URL` that is made here, so that no two
parsers can differ.
"""

from __future__ import annotations

import httpx

from sensorium.multimodal.fetching.hosts import canonical_host
from sensorium.types.errors import RequestError


def parse_media_url(source: str | httpx.URL) -> httpx.URL:
    """An http(s) URL without a fragment, its host canonical; `RequestError` for anything else."""
    try:
        url = httpx.URL(source)
        host = canonical_host(url.raw_host.decode("ascii"))
        if url.scheme not in ("http", "https") or url.userinfo or not _is_port(url.port):
            raise ValueError
        return url.copy_with(host=host, fragment=None)
    except (httpx.InvalidURL, ValueError):  # ValueError: also of idna and of encodings
        raise RequestError(
            "the media URL is malformed: http(s)://host[:port]/path, without a user, is expected"
        ) from None


def _is_port(port: int | None) -> bool:
    return port is None or 0 < port < 2**16
