"""uvicorn's HTTP connection, with a limit on what stands before a body.

The parser keeps a request's line and headers until they are complete, however long they become; so
one connection could fill the memory before anybody has looked at it.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16  # as far as it is known: what comes at once is taken at once
_BODY = (
    b'{"error":{"message":"the headers are larger than %d bytes","type":"invalid_request_error",'
    b'"param":null,"code":"headers_too_large"}}' % MAX_HEAD_BYTES
)
_RESPONSE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\n"
    b"content-length: %d\r\n"
    b"connection: close\r\n"
    b"\r\n"
    b"%s" % (len(_BODY), _BODY)
)


class LimitedHttpProtocol(HttpToolsProtocol):
    """Counts the bytes of a request until its headers are complete."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_in_head = False
        self._num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_in_head:
            self._num_head_bytes = 0
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_RESPONSE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()
