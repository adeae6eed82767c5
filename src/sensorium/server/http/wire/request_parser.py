"""A parser of HTTP requests that continues after an upgrade that the server ignores.

httptools treats all data after a head with `Upgrade` as another protocol, even the request's own
body. But a server may ignore an upgrade and answer in HTTP/1.1 (RFC 9110, section 7.8), as it does
for clients that offer HTTP/2 with a first request: `curl --http2` and Java's HttpClient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import httptools

_UPGRADE = b"upgrade"


class RequestParser(httptools.HttpRequestParser):
    """httptools' parser, which can replace the head of a request if its upgrade is ignored.

    It calls `take_head` at each upgrade. That returns the new head and forgets it, or `None`: then
    an `HttpParserUpgrade` is raised. The connection's further data is parsed behind the new head.
    """

    def __init__(self, protocol: object, take_head: Callable[[], bytes | None]) -> None:
        self._protocol = protocol
        self._take_head = take_head
        self._begin()

    def _begin(self) -> None:
        """Forget all that was parsed."""
        super().__init__(self._protocol)
        # As uvicorn does, which answers the first of several requests before it closes.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override] # no other type is given
        while True:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head = self._take_head()
                if head is None:
                    raise
                self._begin()
                data = head + data[upgrade.args[0] :]


def make_plain_head(
    method: bytes, url: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]
) -> bytes | None:
    """Return a head without its `Upgrade` header, or `None` if it has no such header."""
    lines = [b"%s: %s\r\n" % (name, value) for name, value in headers if name != _UPGRADE]
    if len(lines) == len(headers):
        return None
    return b"".join((b"%s %s HTTP/%s\r\n" % (method, url, version.encode()), *lines, b"\r\n"))
