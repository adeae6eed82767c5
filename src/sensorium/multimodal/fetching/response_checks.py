"""Which answers of a host are taken for media: by type, encoding and size."""

from __future__ import annotations

import io
from collections.abc import AsyncIterable, Mapping

from sensorium.multimodal.fetching.fetch import Fetch

# Hosts that don't know what they store.
_ANY_MODALITY = frozenset({"application/octet-stream", "binary/octet-stream"})
# Main types and whole types. Containers of sound are often sent as videos; some videos are GIFs.
_TYPES_BY_MODALITY: Mapping[str, frozenset[str]] = {
    "image": frozenset({"image"}),
    "video": frozenset({"video", "application/mp4", "application/ogg", "image/gif", "image/webp"}),
    "audio": frozenset({"audio", "video", "application/mp4", "application/ogg"}),
}
# A piece costs about 10 us to parse; this many are free, the rest is measured by their mean size.
_MIN_CHUNKS = 4096
_MIN_CHUNK_BYTES = 256
MODALITIES = frozenset(_TYPES_BY_MODALITY)


def check_content_type(headers: Mapping[str, str], modality: str, fetch: Fetch) -> None:
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    allowed = _TYPES_BY_MODALITY[modality] | _ANY_MODALITY
    if content_type and not {content_type, content_type.partition("/")[0]} & allowed:
        raise fetch.refusal(f"the content type of the answer is not for {modality}", "content_type")


def check_before_body(headers: Mapping[str, str], max_bytes: int, fetch: Fetch) -> None:
    """Compressed answers are refused: none was asked for, and they may unpack without end."""
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise fetch.refusal("the answer is compressed", "content_encoding")
    # httpcore lets only plain digits through, 20 at most.
    if int(headers.get("content-length", "0")) > max_bytes:
        raise _too_large(max_bytes, fetch)


async def read_body(chunks: AsyncIterable[bytes], max_bytes: int, fetch: Fetch) -> bytes:
    """Tiny pieces are refused: a host could keep a core busy at the cost of a few bytes each."""
    body = io.BytesIO()
    num_chunks = -1
    async for chunk in chunks:
        num_chunks += 1
        if body.tell() + len(chunk) > max_bytes:
            raise _too_large(max_bytes, fetch)
        body.write(chunk)
        fetch.add_bytes(len(chunk))
        if num_chunks > _MIN_CHUNKS + body.tell() // _MIN_CHUNK_BYTES:
            raise fetch.refusal("the answer comes in too small pieces", "protocol")
    return body.getvalue()


def _too_large(max_bytes: int, fetch: Fetch) -> Exception:
    return fetch.refusal(f"it is larger than {max_bytes} bytes", "size")
