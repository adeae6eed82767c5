"""Connections to checked addresses only, whose every wait ends with the fetch's deadline.

httpcore asks this backend for each connection, so there is no way around the check; TLS keeps the
name of the URL, since only the dialled address is replaced.
"""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any

import httpcore

from sensorium.multimodal.media.address_guard import AddressGuard
from sensorium.multimodal.media.fetch import PATIENCE_S, Fetch

Connect = Callable[[str, int, float], socket.socket]
_MAX_ADDRESSES = 8
_MAX_HEAD_BYTES = 256 * 1024


def connect_socket(address: str, port: int, timeout_s: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=timeout_s)


class PinnedBackend(httpcore.NetworkBackend):
    """Made for one fetch; the timeouts that httpcore passes give way to what the fetch has left."""

    def __init__(self, *, guard: AddressGuard, connect: Connect, fetch: Fetch) -> None:
        self._guard = guard
        self._connect = connect
        self._fetch = fetch

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002
        local_address: str | None = None,  # noqa: ARG002
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        addresses = self._guard.look_up(host, port, self._fetch)[:_MAX_ADDRESSES]
        for num_left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            # A dead address may not use up the time of those behind it.
            timeout_s = self._fetch.remaining_s() / num_left
            try:
                return DeadlineStream(self._connect(address, port, timeout_s), self._fetch)
            except OSError:
                continue
        self._fetch.remaining_s()
        raise self._fetch.refusal("no connection could be made", "connection")


class DeadlineStream(httpcore.NetworkStream):
    """A socket whose reads and writes take no longer than what its fetch has left, and that gives
    a bounded number of bytes until `expect_body`: httpcore bounds the head of an answer, but not
    how many interim answers may come before it.
    """

    def __init__(self, connection: socket.socket, fetch: Fetch) -> None:
        self._socket = connection
        self._fetch = fetch
        self._num_head_bytes_left: float = _MAX_HEAD_BYTES

    def expect_body(self) -> None:
        self._num_head_bytes_left = math.inf

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        if self._num_head_bytes_left <= 0:
            raise httpcore.RemoteProtocolError
        while True:
            try:
                self._socket.settimeout(min(PATIENCE_S, self._fetch.remaining_s()))
                received = self._socket.recv(max_bytes)
            except TimeoutError:
                continue
            except OSError as error:
                raise httpcore.ReadError from error
            self._num_head_bytes_left -= len(received)
            return received

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        try:
            while buffer:
                self._socket.settimeout(self._fetch.remaining_s())
                buffer = buffer[self._socket.send(buffer) :]
        except TimeoutError:
            raise self._fetch.expired() from None
        except OSError as error:
            raise httpcore.WriteError from error

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        try:
            self._socket.settimeout(self._fetch.remaining_s())
            encrypted = ssl_context.wrap_socket(self._socket, server_hostname=server_hostname)
        except TimeoutError:
            raise self._fetch.expired() from None
        except ssl.SSLCertVerificationError:
            raise self._fetch.refusal("its certificate can't be verified", "tls") from None
        except (OSError, ValueError):  # ValueError: a name that TLS can't carry
            raise self._fetch.refusal("no TLS connection could be made", "tls") from None
        finally:
            self._socket.close()  # without effect once it is wrapped
        return DeadlineStream(encrypted, self._fetch)

    def close(self) -> None:
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        """httpcore asks for `ssl_object`, to see which protocol was agreed on."""
        if info == "ssl_object" and isinstance(self._socket, ssl.SSLSocket):
            return self._socket
        return None
