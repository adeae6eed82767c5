"""uvicorn's HTTP connection, with a limit on what stands before a body, and after it.

The parser keeps a request's line, headers and trailers until they are complete, however long they
become; so one connection could fill the memory before anybody has looked at it.
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
    """Counts the bytes that came since the last that belong to a body, or that end a request."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_understood = False
        self._num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._is_understood = False
        super().data_received(data)
        self._num_head_bytes = 0 if self._is_understood else self._num_head_bytes + len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_RESPONSE)
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._is_understood = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_understood = True
        super().on_message_complete()
