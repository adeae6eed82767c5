"""Responses of media hosts: which are accepted as media, which are kept, and which are shared.

Freshness follows RFC 9111 for a shared cache, without heuristics: a response is fresh only for as
long as its headers allow explicitly. Requests are always sent with the same headers, so that any
`Vary` but `*` is satisfied. Headers are mappings from lower-case names to values.
"""

from __future__ import annotations

import asyncio
import copy
import io
import re
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from sensorium.multimodal.fetching.fetch import RefusedMediaError, RequestBytes, refuse_above
from sensorium.multimodal.media_item import MediaBytes
from sensorium.types.errors import RequestError
from sensorium.utils.lru import LruCache

Headers = Mapping[str, str]

_DIRECTIVE = re.compile(r"""([\w-]+)(?:\s*=\s*(?:"([^"]*)"|([^\s,"]*)))?""")
_MAX_LIFETIME_S = 10 * 365 * 86400


def _parse_cache_control(headers: Headers) -> dict[str, str]:
    """Return directive -> value, `""` for one without a value.

    The first of each directive counts.
    """
    directives: dict[str, str] = {}
    for name, quoted, plain in _DIRECTIVE.findall(headers.get("cache-control", "")):
        directives.setdefault(name.lower(), quoted or plain)
    return directives


def is_storable(headers: Headers) -> bool:
    """Return True if a shared cache may store the response."""
    is_forbidden = {"no-store", "private"} & _parse_cache_control(headers).keys()
    return not is_forbidden and "*" not in headers.get("vary", "")


def compute_fresh_until(headers: Headers, now: float) -> float:
    """Return the time until which a response that came at `now` may be used without asking."""
    directives = _parse_cache_control(headers)
    if "no-cache" in directives:
        return now
    sent_at = _parse_date(headers.get("date", ""))
    sent_at = now if sent_at is None else sent_at
    age_s = max(_parse_seconds(headers.get("age", "0")), now - sent_at)
    return now + _compute_lifetime_s(headers, directives, sent_at) - age_s


def _compute_lifetime_s(headers: Headers, directives: Mapping[str, str], sent_at: float) -> float:
    for name in ("s-maxage", "max-age"):
        if name in directives:
            return _parse_seconds(directives[name])
    expires_at = _parse_date(headers.get("expires", ""))
    return 0 if expires_at is None else min(expires_at - sent_at, _MAX_LIFETIME_S)


def _parse_seconds(text: str) -> int:
    """Return the number of seconds in the text, or 0 if it is no number."""
    text = text.strip()
    if not (text.isascii() and text.isdigit()):
        return 0
    # Long numbers are not parsed: `int` refuses those of more than 4300 digits.
    return _MAX_LIFETIME_S if len(text) > 9 else min(int(text), _MAX_LIFETIME_S)


def _parse_date(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


# Headers that describe one message, and not the content that it confirms.
_MESSAGE_HEADERS = ("age", "date")
_CONTENT_HEADERS = ("cache-control", "content-type", "etag", "expires", "last-modified", "vary")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedResponse:
    """A response to a media URL."""

    media: MediaBytes  # the same object for as long as the host confirms the content
    headers: Headers
    fresh_until: float  # until this time it may be used without asking the host

    @classmethod
    def receive(cls, media: MediaBytes, headers: Headers, now: float) -> CachedResponse:
        """Return the response that came at `now`."""
        names = (*_MESSAGE_HEADERS, *_CONTENT_HEADERS)
        kept = {name: headers[name] for name in names if name in headers}
        return cls(media=media, headers=kept, fresh_until=compute_fresh_until(kept, now))

    def confirm(self, headers: Headers, now: float) -> CachedResponse:
        """Return the same content under the headers of a "not modified" response."""
        lasting = {name: v for name, v in self.headers.items() if name not in _MESSAGE_HEADERS}
        return self.receive(self.media, {**lasting, **headers}, now)

    @property
    def validators(self) -> dict[str, str]:
        """Return the request headers that ask whether the content is still the same."""
        names = {"etag": "If-None-Match", "last-modified": "If-Modified-Since"}
        return {ask: self.headers[name] for name, ask in names.items() if self.headers.get(name)}

    @property
    def num_bytes(self) -> int:
        return len(self.media.data) + sum(map(len, self.headers.values()))


class ResponseCache(LruCache[str, CachedResponse]):
    """The responses to media URLs that may be kept, fresh or not, within a number of bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, lambda url, response: len(url) + response.num_bytes)

    def replace(self, url: str, response: CachedResponse, now: float) -> None:
        """Forget what was kept for `url`, and keep `response` if that is allowed and it fits."""
        is_useful = response.fresh_until > now or response.validators
        if is_useful and is_storable(response.headers):
            self.put(url, response)
        else:
            self.remove(url)


# What hosts send that do not look at the files they store.
_ANY_MODALITY = frozenset({"application/octet-stream", "binary/octet-stream"})
# Main types and whole types. Sound is often sent in containers of videos, and some videos are GIFs.
_TYPES_BY_MODALITY: Mapping[str, frozenset[str]] = {
    "image": frozenset({"image"}),
    "video": frozenset({"video", "application/mp4", "application/ogg", "image/gif", "image/webp"}),
    "audio": frozenset({"audio", "video", "application/mp4", "application/ogg"}),
}
# Parsing one piece of a body costs about 10 us. The first pieces may be of any size, and all pieces
# must have this size on average.
_MIN_CHUNKS = 4096
_MIN_CHUNK_BYTES = 256
MODALITIES = frozenset(_TYPES_BY_MODALITY)


def check_content_type(headers: Headers, modality: str) -> None:
    """Raise a refusal if the headers name a type that is not of this modality."""
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    allowed = _TYPES_BY_MODALITY[modality] | _ANY_MODALITY
    if content_type and not {content_type, content_type.partition("/")[0]} & allowed:
        raise RefusedMediaError(
            f"the content type of the answer is not for {modality}", "content_type"
        )


def check_before_body(headers: Headers, max_bytes: int) -> None:
    """Raise a refusal if the response is compressed or too large.

    No compression was asked for, and a compressed body may have any size when it is unpacked.
    """
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise RefusedMediaError("the answer is compressed", "content_encoding")
    # httpcore accepts only plain digits here, 20 at most.
    refuse_above(max_bytes, int(headers.get("content-length", "0")))


async def read_body(chunks: AsyncIterable[bytes], max_bytes: int, held: RequestBytes) -> bytes:
    """Return the whole body. Raise a refusal if it is too large or comes in tiny pieces.

    Tiny pieces would let a host keep a core busy at the cost of a few bytes each.
    """
    body = io.BytesIO()
    num_chunks = -1
    async for chunk in chunks:
        num_chunks += 1
        refuse_above(max_bytes, body.tell() + len(chunk))
        body.write(chunk)
        held.add(len(chunk))
        if num_chunks > _MIN_CHUNKS + body.tell() // _MIN_CHUNK_BYTES:
            raise RefusedMediaError("the answer comes in too small pieces", "protocol")
    return body.getvalue()


Address = tuple[str, str]  # a URL and a modality


class SharedFetches:
    """The fetches that run at this moment: one per URL and modality.

    A request that comes while a fetch runs waits for its result. The fetch belongs to the request
    that began it and ends with it. Then one of the requests that waited begins another fetch. So no
    request is bound to the deadline of another. Used on one event loop only.
    """

    def __init__(self) -> None:
        self.num_waiting = 0  # callers of `get`, including those that fetch
        self._running: dict[Address, asyncio.Future[MediaBytes]] = {}

    async def get(self, key: Address, start: Callable[[], Awaitable[MediaBytes]]) -> MediaBytes:
        """Return the result of the running fetch of `key`, or that of `start` if none runs."""
        self.num_waiting += 1
        try:
            while (running := self._running.get(key)) is not None:
                await asyncio.wait([running])
                if not running.cancelled():  # otherwise its owner gave up before there was a result
                    if (error := running.exception()) is not None:
                        raise copy.copy(error)  # for each caller, because tracebacks grow
                    return running.result()
            return await self._lead(key, start)
        finally:
            self.num_waiting -= 1

    async def _lead(self, key: Address, start: Callable[[], Awaitable[MediaBytes]]) -> MediaBytes:
        running = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            media = await start()
        except RequestError as error:
            # A copy, because the error itself holds this frame, and this frame the future.
            running.set_exception(copy.copy(error))
            running.exception()  # asyncio warns of an exception that no caller has looked at
            raise
        except BaseException:
            running.cancel()
            raise
        finally:
            del self._running[key]
        running.set_result(media)
        return media
