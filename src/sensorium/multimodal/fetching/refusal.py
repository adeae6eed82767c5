"""Why media was not loaded: an error for the client, and a word for the counters.

Texts may repeat what the client itself sent. They never hold a resolved address, the target of a
redirect, a path on disk or another library's words.
"""

from __future__ import annotations

from typing import Literal

from sensorium.types.errors import MediaFetchError

RefusalReason = Literal[
    "malformed",
    "size",
    "empty",
    "local_file",
    "scheme",
    "domain",
    "dns",
    "address",
    "connection",
    "tls",
    "protocol",
    "status",
    "redirects",
    "content_type",
    "content_encoding",
    "deadline",
]


class RefusedMediaError(MediaFetchError):
    """A `MediaFetchError` that knows under which reason it is counted."""

    def __init__(self, message: str, reason: RefusalReason) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason


def refuse_above(max_bytes: int, num_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RefusedMediaError(f"the media is larger than {max_bytes} bytes", "size")
