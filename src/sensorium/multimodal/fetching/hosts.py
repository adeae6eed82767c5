"""Decides which hosts may be asked for media, and which of their responses are accepted and kept.

Names become addresses only here. A canonical host is ASCII (IDNA), lower case and without a
trailing dot. All spellings of an IPv4 address (decimal, octal, hexadecimal, shortened) become the
usual one.

Freshness follows RFC 9111 for a shared cache, without heuristics: a response is fresh only for as
long as its headers allow explicitly. Requests are always sent with the same headers, so that any
`Vary` but `*` is satisfied. Headers are mappings from lower-case names to values, and times are
Unix times in seconds.

Invariants:
  1. Every address of a name is checked. If one is forbidden, the name is refused.
  2. The addresses that are returned are those that were checked: nothing is looked up again before
     connecting.
  3. A client can't distinguish a name that doesn't exist from one with a private address.
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
import re
import socket
import threading
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from sensorium.multimodal.fetching.fetch import RefusedMediaError, RequestBytes, refuse_above
from sensorium.multimodal.media import MediaBytes
from sensorium.types.errors import CapacityError, RequestError
from sensorium.utils.lru import LruCache

_NAME = re.compile(r"(?!.{254})(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")


def canonical_host(host: str) -> str:
    """Return the one spelling of a host that all checks compare, or raise `ValueError`."""
    if ":" in host:
        if "%" in host:
            raise ValueError("an IPv6 address with a zone (%) has a meaning on this machine only")
        return str(ipaddress.IPv6Address(host))
    host = host.lower().removesuffix(".")
    if not _NAME.fullmatch(host):
        raise ValueError(f"{host!r} is not a host name")
    # As in browsers, a name that ends in a number is an address or an error.
    if not _NUMBER.fullmatch(host.rpartition(".")[2]):
        return host
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        raise ValueError(f"{host!r} is not an IPv4 address") from None


class AllowedDomains:
    """The hosts that media may be fetched from, as the operator has listed them.

    An entry `example.com` allows that host alone. `.example.com` or `*.example.com` allows every
    host below it, but not `example.com` itself. An empty list allows all hosts.
    """

    def __init__(self, domains: frozenset[str]) -> None:
        names = [name.strip().removeprefix("*") for name in domains]
        self._hosts = {_parse_domain(name) for name in names if not name.startswith(".")}
        self._suffixes = tuple("." + _parse_domain(name[1:]) for name in names if name[:1] == ".")

    def has(self, host: str) -> bool:
        """Return True if media may be fetched from this canonical host."""
        if not self._hosts and not self._suffixes:
            return True
        return host in self._hosts or host.endswith(self._suffixes)


def _parse_domain(domain: str) -> str:
    try:
        ascii_domain = domain.strip("[]").encode("idna").decode("ascii")
        return canonical_host(ascii_domain)
    except ValueError:
        raise RequestError(
            "an allowed media domain must be a host such as example.com or *.example.com, without "
            f"scheme, port and path, not {domain!r}"
        ) from None


Resolve = Callable[[str, int], Sequence[str]]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# These networks are not public, although some Python releases call them global: protocol
# assignments, and relays of 6to4 (RFC 7526).
_SPECIAL_V4 = [ipaddress.IPv4Network(net) for net in ("192.0.0.0/24", "192.88.99.0/24")]
# All public IPv6 addresses are in this network, but not in its special parts: protocol assignments
# with Teredo, 6to4 (both contain IPv4 addresses), and documentation.
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6 = [ipaddress.IPv6Network(net) for net in ("2001::/23", "2002::/16", "3fff::/20")]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def resolve_host(host: str, port: int) -> list[str]:
    """Return all addresses of a host, or raise `OSError`; this blocks on the system's resolver."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_allowed(address: IPAddress, *, allow_private: bool) -> bool:
    """Return True if the server may connect to this IP address.

    Multicast and unspecified addresses are never allowed, and others that are not public only with
    `allow_private`. An IPv4 address inside an IPv6 address is checked as IPv4.
    """
    address = _embedded_v4(address) or address
    if address.is_multicast or address.is_unspecified:
        return False
    return allow_private or _is_public(address)


def _embedded_v4(address: IPAddress) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that a NAT64 or IPv4-mapped IPv6 address contains, or `None`."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped
    return None


def _is_public(address: IPAddress) -> bool:
    if not address.is_global or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    return address in _PUBLIC_V6 and not any(address in network for network in _SPECIAL_V6)


# This is more than the fetches that can be under way by default. The rest is for look-ups that
# outlive their clients.
_MAX_LOOK_UPS = 1024


class AddressGuard:
    """A resolver that returns the addresses of a host only if the server may connect to them.

    Use it on one event loop. The system's resolver blocks, may take half a minute for one name, and
    can't be interrupted. So each look-up has a thread of its own, and a slow name delays no other
    one.
    """

    def __init__(
        self, resolve: Resolve, *, allow_private: bool, max_look_ups: int = _MAX_LOOK_UPS
    ) -> None:
        self._resolve = resolve
        self._allow_private = allow_private
        # A look-up has a place here until its thread ends, also when its fetch was cancelled.
        self._places = asyncio.Semaphore(max_look_ups)

    async def look_up(self, host: str, port: int) -> list[str]:
        """Return all addresses of `host` in the order to try them, or raise `RefusedMediaError`."""
        try:
            addresses = [ipaddress.ip_address(host)]
        except ValueError:
            addresses = await self._find(host, port)
        # Both refusals have one text, so that a client can't find out which private names exist.
        if not addresses:
            raise RefusedMediaError(
                "the URL leads to an unknown host or to a non-public address (allowed only with "
                "--allow-private-media-addresses)",
                "dns",
            )
        if not all(is_allowed(one, allow_private=self._allow_private) for one in addresses):
            raise RefusedMediaError(
                "the URL leads to an unknown host or to a non-public address (allowed only with "
                "--allow-private-media-addresses)",
                "address",
            )
        return [str(address) for address in addresses]

    async def _find(self, host: str, port: int) -> list[IPAddress]:
        """Return the addresses of a host name, or an empty list if the resolver fails."""
        loop = asyncio.get_running_loop()
        found: Future[Sequence[str]] = Future()
        found.set_running_or_notify_cancel()  # from here on it can't be cancelled, only ignored

        def run() -> None:
            try:
                found.set_result(self._resolve(host, port))
            except BaseException as error:  # raised where the result is awaited
                found.set_exception(error)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._places.release)

        await self._places.acquire()
        try:
            # A daemon, because a resolver that hangs must not keep the process from ending.
            threading.Thread(target=run, name="media-dns", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            self._places.release()
            raise CapacityError(
                "no thread could be started to look up a media host: retry later"
            ) from error
        try:
            return [ipaddress.ip_address(one) for one in await asyncio.wrap_future(found)]
        except (OSError, ValueError):  # ValueError: a name that has no encoding, or no address
            return []


Headers = Mapping[str, str]

_DIRECTIVE = re.compile(r"""([\w-]+)(?:\s*=\s*(?:"([^"]*)"|([^\s,"]*)))?""")
_MAX_LIFETIME_S = 10 * 365 * 86400


def _parse_cache_control(headers: Headers) -> dict[str, str]:
    """Return the directives of `Cache-Control`, the first of each name, with "" for no value."""
    directives: dict[str, str] = {}
    for name, quoted, plain in _DIRECTIVE.findall(headers.get("cache-control", "")):
        directives.setdefault(name.lower(), quoted or plain)
    return directives


def is_storable(headers: Headers) -> bool:
    """Return True if these response headers allow a shared cache to store the response."""
    is_forbidden = {"no-store", "private"} & _parse_cache_control(headers).keys()
    return not is_forbidden and "*" not in headers.get("vary", "")


def compute_fresh_until(headers: Headers, now: float) -> float:
    """Return until when a response, received at `now`, may be reused without asking its host.

    If the headers allow no reuse, the result is not later than `now`.
    """
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
    """A response to a media URL, with the headers that decide how long it may be reused."""

    media: MediaBytes  # the same object for as long as the host confirms the content
    headers: Headers
    fresh_until: float  # until this time it may be used without asking the host

    @classmethod
    def receive(cls, media: MediaBytes, headers: Headers, now: float) -> CachedResponse:
        """Return a response received at `now`, with only the headers that matter for caching."""
        names = (*_MESSAGE_HEADERS, *_CONTENT_HEADERS)
        kept = {name: headers[name] for name in names if name in headers}
        return cls(media=media, headers=kept, fresh_until=compute_fresh_until(kept, now))

    def confirm(self, headers: Headers, now: float) -> CachedResponse:
        """Return this response with the headers of a "304 Not Modified" received at `now`."""
        lasting = {name: v for name, v in self.headers.items() if name not in _MESSAGE_HEADERS}
        return self.receive(self.media, {**lasting, **headers}, now)

    @property
    def validators(self) -> dict[str, str]:
        """Return the request headers, if any, that ask whether the content is still the same."""
        names = {"etag": "If-None-Match", "last-modified": "If-Modified-Since"}
        return {ask: self.headers[name] for name, ask in names.items() if self.headers.get(name)}

    @property
    def num_bytes(self) -> int:
        return len(self.media.data) + sum(map(len, self.headers.values()))


class ResponseCache(LruCache[str, CachedResponse]):
    """A cache of responses by their media URLs, which evicts the least recently used ones.

    A response that is no longer fresh stays, because its host may confirm it.
    """

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, lambda url, response: len(url) + response.num_bytes)

    def replace(self, url: str, response: CachedResponse, now: float) -> None:
        """Store the newest response of `url` in place of an older one.

        The older response is removed in any case. The new one is not stored if its headers forbid
        that, if it could never be reused, or if it does not fit.
        """
        is_useful = response.fresh_until > now or response.validators
        if is_useful and is_storable(response.headers):
            self.put(url, response)
        else:
            self.remove(url)


# The content types that hosts send for any file, without looking at its content.
_ANY_MODALITY = frozenset({"application/octet-stream", "binary/octet-stream"})
# Main types and whole types. Audio is often sent in containers of videos, and some videos are GIFs.
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
    """Raise `RefusedMediaError` if the `Content-Type` header belongs to another modality.

    A missing header and types for any binary data (`application/octet-stream`) are accepted.
    """
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    allowed = _TYPES_BY_MODALITY[modality] | _ANY_MODALITY
    if content_type and not {content_type, content_type.partition("/")[0]} & allowed:
        raise RefusedMediaError(
            f"the content type of the host's response is not that of {modality}", "content_type"
        )


def check_before_body(headers: Headers, max_bytes: int) -> None:
    """Raise `RefusedMediaError` if the headers announce a body that is compressed or too large.

    Our requests ask for an uncompressed body: a compressed one may unpack to any size.
    """
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise RefusedMediaError(
            "the host's response is compressed, which is not supported", "content_encoding"
        )
    # httpcore accepts only plain digits here, 20 at most.
    refuse_above(max_bytes, int(headers.get("content-length", "0")))


async def read_body(chunks: AsyncIterable[bytes], max_bytes: int, held: RequestBytes) -> bytes:
    """Read the chunks of a response, and return the whole body, which is counted in `held`.

    Raise `RefusedMediaError` if the body has more than `max_bytes`, or comes in very many tiny
    chunks, with which a host could keep a CPU core busy.
    """
    body = io.BytesIO()
    num_chunks = -1
    async for chunk in chunks:
        num_chunks += 1
        refuse_above(max_bytes, body.tell() + len(chunk))
        body.write(chunk)
        held.add(len(chunk))
        if num_chunks > _MIN_CHUNKS + body.tell() // _MIN_CHUNK_BYTES:
            raise RefusedMediaError("the host sends too many tiny chunks", "protocol")
    return body.getvalue()
