"""Connections to checked addresses only.

httpcore asks this backend for each connection, so there is no way around the check; TLS keeps the
name of the URL, since only the dialled address is replaced. Waits have no timeouts of their own:
the deadline of the fetch cancels them.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpcore

from sensorium.multimodal.fetching.address_guard import AddressGuard
from sensorium.multimodal.fetching.fetch import Fetch

Connect = Callable[[str, int, float], Awaitable[httpcore.AsyncNetworkStream]]
_MAX_ADDRESSES = 8
_MAX_HEAD_BYTES = 256 * 1024
_CONNECT_ERRORS = (OSError, httpcore.ConnectError, httpcore.ConnectTimeout)


async def connect_socket(address: str, port: int, timeout_s: float) -> httpcore.AsyncNetworkStream:
    """Connect to an address, which is dialled as it is: no name is looked up."""
    return await httpcore.AnyIOBackend().connect_tcp(address, port, timeout=timeout_s)


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """The network of one exchange, which makes one connection at most."""

    def __init__(self, *, guard: AddressGuard, connect: Connect, fetch: Fetch) -> None:
        self._guard = guard
        self._connect = connect
        self._fetch = fetch
        self._stream: httpcore.AsyncNetworkStream | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002
        local_address: str | None = None,  # noqa: ARG002
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> httpcore.AsyncNetworkStream:
        addresses = (await self._guard.look_up(host, port, self._fetch))[:_MAX_ADDRESSES]
        for num_left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            # A dead address may not use up the time of those behind it.
            timeout_s = self._fetch.remaining_s() / num_left
            try:
                self._stream = await self._connect(address, port, timeout_s)
            except _CONNECT_ERRORS:
                continue
            return PinnedStream(self._stream, self._fetch)
        if not self._fetch.remaining_s():
            raise self._fetch.expired()
        raise self._fetch.refusal("no connection could be made", "connection")

    async def close(self) -> None:
        """Close the connection, also one that httpcore has no hold of yet or no longer."""
        if self._stream is not None:
            await self._stream.aclose()


class PinnedStream(httpcore.AsyncNetworkStream):
    """A stream that gives a bounded number of bytes until `expect_body`: httpcore bounds the head
    of an answer, but not how many interim answers may come before it.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream, fetch: Fetch) -> None:
        self._stream = stream
        self._fetch = fetch
        self._num_head_bytes_left: float = _MAX_HEAD_BYTES

    def expect_body(self) -> None:
        self._num_head_bytes_left = math.inf

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        if self._num_head_bytes_left <= 0:
            raise httpcore.RemoteProtocolError
        # Also yields to other fetches when the bytes are there already.
        received = await self._stream.read(max_bytes)
        self._num_head_bytes_left -= len(received)
        return received

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        await self._stream.write(buffer)

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> httpcore.AsyncNetworkStream:
        try:
            encrypted = await self._stream.start_tls(ssl_context, server_hostname)
        except (httpcore.ConnectError, OSError, ValueError) as error:
            # ValueError: a name that TLS can't carry.
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                raise self._fetch.refusal("its certificate can't be verified", "tls") from None
            raise self._fetch.refusal("no TLS connection could be made", "tls") from None
        return PinnedStream(encrypted, self._fetch)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
