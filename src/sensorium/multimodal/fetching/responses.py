"""Responses of media hosts: which are taken for media, which are kept, and which are shared.

Freshness follows RFC 9111, as a shared cache without guesses. A response is fresh only for as long
as its headers allow explicitly. Requests are always sent with the same headers, so that any `Vary`
but `*` is satisfied. Headers are mappings from lower-case names to values.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from sensorium.multimodal.fetching.fetch import Fetch
from sensorium.multimodal.media import MediaBytes
from sensorium.multimodal.single_flight import copy_error
from sensorium.utils.lru import LruCache

Headers = Mapping[str, str]

_DIRECTIVE = re.compile(r"""([\w-]+)(?:\s*=\s*(?:"([^"]*)"|([^\s,"]*)))?""")
_MAX_LIFETIME_S = 10 * 365 * 86400


def parse_cache_control(headers: Headers) -> dict[str, str]:
    """Return directive -> value, `""` for one without a value.

    The first of each directive counts.
    """
    directives: dict[str, str] = {}
    for name, quoted, plain in _DIRECTIVE.findall(headers.get("cache-control", "")):
        directives.setdefault(name.lower(), quoted or plain)
    return directives


def is_storable(headers: Headers) -> bool:
    directives = parse_cache_control(headers)
    if "no-store" in directives or "private" in directives:
        return False
    return "*" not in headers.get("vary", "")


def make_validators(headers: Headers) -> dict[str, str]:
    """Return the request headers that ask whether the content is still the same."""
    names = {"etag": "If-None-Match", "last-modified": "If-Modified-Since"}
    return {ask: headers[name] for name, ask in names.items() if headers.get(name)}


def compute_fresh_until(headers: Headers, now: float) -> float:
    """Return the time until which a response that came at `now` may be used without asking."""
    directives = parse_cache_control(headers)
    if "no-cache" in directives:
        return now
    sent_at = _parse_date(headers.get("date"))
    sent_at = now if sent_at is None else sent_at
    age_s = max(_parse_seconds(headers.get("age", "0")), now - sent_at)
    return now + _compute_lifetime_s(headers, directives, sent_at) - age_s


def _compute_lifetime_s(headers: Headers, directives: Mapping[str, str], sent_at: float) -> float:
    for name in ("s-maxage", "max-age"):
        if name in directives:
            return _parse_seconds(directives[name])
    expires_at = _parse_date(headers.get("expires"))
    return 0 if expires_at is None else min(expires_at - sent_at, _MAX_LIFETIME_S)


def _parse_seconds(text: str) -> int:
    """Return the number of seconds in the text, or 0 if it is no number."""
    text = text.strip()
    if not (text.isascii() and text.isdigit()):
        return 0
    return _MAX_LIFETIME_S if len(text) > 9 else min(int(text), _MAX_LIFETIME_S)


def _parse_date(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


_KEPT_HEADERS = (
    "age",
    "cache-control",
    "content-type",
    "date",
    "etag",
    "expires",
    "last-modified",
    "vary",
)
# Headers that describe one message, and not the content that it confirms.
_MESSAGE_HEADERS = ("age", "date")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedResponse:
    """A response to a media URL."""

    media: MediaBytes  # the same object for as long as the host confirms the content
    headers: Mapping[str, str]
    fresh_until: float

    @classmethod
    def receive(cls, media: MediaBytes, headers: Mapping[str, str], now: float) -> CachedResponse:
        kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
        return cls(media=media, headers=kept, fresh_until=compute_fresh_until(kept, now))

    def confirm(self, headers: Mapping[str, str], now: float) -> CachedResponse:
        """Return the same content under the headers of a "not modified" answer."""
        lasting = {k: v for k, v in self.headers.items() if k not in _MESSAGE_HEADERS}
        return self.receive(self.media, {**lasting, **headers}, now)

    @property
    def validators(self) -> dict[str, str]:
        return make_validators(self.headers)

    @property
    def num_bytes(self) -> int:
        return len(self.media.data) + sum(map(len, self.headers.values()))

    def is_worth_keeping(self, now: float) -> bool:
        return is_storable(self.headers) and (self.fresh_until > now or bool(self.validators))


class ResponseCache:
    """The responses to media URLs that may be kept, within a number of bytes. Thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self._responses: LruCache[str, CachedResponse] = LruCache(
            capacity_bytes, lambda url, response: len(url) + response.num_bytes
        )

    @property
    def num_bytes(self) -> int:
        return self._responses.weight

    def get(self, url: str) -> CachedResponse | None:
        """Return what is kept for `url`, fresh or not."""
        return self._responses.get(url)

    def replace(self, url: str, response: CachedResponse, now: float) -> None:
        """Forget what was kept for `url`, and keep `response` if that is allowed and it fits."""
        if response.is_worth_keeping(now):
            self._responses.put(url, response)
        else:
            self._responses.remove(url)

    def clear(self) -> None:
        self._responses.clear()


# Types of hosts that do not look at what they store.
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
    """Raise a refusal if the answer is compressed or too large.

    No compression was asked for, and a compressed answer may unpack without end.
    """
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise fetch.refusal("the answer is compressed", "content_encoding")
    # httpcore lets only plain digits through, 20 at most.
    if int(headers.get("content-length", "0")) > max_bytes:
        raise _too_large(max_bytes, fetch)


async def read_body(chunks: AsyncIterable[bytes], max_bytes: int, fetch: Fetch) -> bytes:
    """Return the whole body. Raise a refusal if it is too large or comes in tiny pieces.

    A host could keep a core busy with tiny pieces, at the cost of a few bytes each.
    """
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


Key = tuple[str, str]  # a URL and a modality


class SharedFetches:
    """The fetches that run at this moment: one per URL and modality.

    A request that comes while a fetch runs waits for its result. The fetch belongs to the request
    that began it and ends with it; then one of those that waited begins another. So no request is
    bound to the deadline of another. Used on one event loop only.
    """

    def __init__(self) -> None:
        self.num_waiting = 0  # callers of `get`, those that fetch included
        self._running: dict[Key, asyncio.Future[MediaBytes]] = {}

    async def get(self, key: Key, start: Callable[[], Awaitable[MediaBytes]]) -> MediaBytes:
        """Return what the running fetch of `key` brings, or what `start` does if there is none."""
        self.num_waiting += 1
        try:
            while (running := self._running.get(key)) is not None:
                await asyncio.wait([running])
                if not running.cancelled():  # else its owner has left, or was too late
                    return _take(running)
            return await self._lead(key, start)
        finally:
            self.num_waiting -= 1

    async def _lead(self, key: Key, start: Callable[[], Awaitable[MediaBytes]]) -> MediaBytes:
        running = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            media = await start()
        except Exception as error:
            # A copy: the error itself holds this frame, and so the future that would hold it.
            running.set_exception(copy_error(error))
            running.exception()  # looked at, should no other request wait for it
            raise
        except BaseException:
            running.cancel()
            raise
        finally:
            del self._running[key]
        running.set_result(media)
        return media


def _take(running: asyncio.Future[MediaBytes]) -> MediaBytes:
    error = running.exception()
    if error is not None:
        raise copy_error(error)  # a copy for each caller: a traceback grows with each raise
    return running.result()
