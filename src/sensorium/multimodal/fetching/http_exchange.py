"""One request to one host, and its answer with the body still to come.

A connection serves one request. Nothing of the environment, no cookie, no credential and no proxy
has a part in it; the head of the answer is bounded by httpcore (100 KiB), its body by the reader.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpcore
import httpx

from sensorium.multimodal.fetching.fetch import Fetch
from sensorium.multimodal.fetching.pinned_connection import PinnedBackend

_DEFAULT_PORTS = {"http": 80, "https": 443}
# The same for every request and modality, which is what makes a cached answer good for all.
_HEADERS = {
    "User-Agent": "sensorium",
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "Connection": "close",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`headers`: by lower-case name, repeated ones joined by commas."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterable[bytes]


@asynccontextmanager
async def open_exchange(
    url: httpx.URL,
    validators: Mapping[str, str],
    *,
    backend: PinnedBackend,
    ssl_context: ssl.SSLContext | None,
    fetch: Fetch,
) -> AsyncIterator[Answer]:
    """What goes wrong on the wire, also while the body is read inside, is refused as media."""
    host, port = url.raw_host, url.port or _DEFAULT_PORTS[url.scheme]
    origin = httpcore.Origin(scheme=url.raw_scheme, host=host, port=port)
    target = httpcore.URL(scheme=url.raw_scheme, host=host, port=port, target=url.raw_path)
    headers = {"Host": url.netloc.decode("ascii"), **_HEADERS, **validators}
    sent = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
    try:
        async with (
            httpcore.AsyncHTTPConnection(
                origin, ssl_context=ssl_context, network_backend=backend
            ) as connection,
            connection.stream("GET", target, headers=sent) as response,
        ):
            response.extensions["network_stream"].expect_body()
            yield Answer(
                status=response.status,
                headers=_join_headers(response.headers),
                chunks=response.aiter_stream(),
            )
    except (httpcore.NetworkError, httpcore.TimeoutException):
        raise fetch.refusal("the connection broke", "connection") from None
    except httpcore.ProtocolError:
        raise fetch.refusal("the answer is not complete, valid HTTP", "protocol") from None
    finally:
        await backend.close()


def _join_headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in pairs:
        name, value = raw_name.decode("ascii").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
