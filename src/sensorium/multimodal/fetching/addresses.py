"""Which hosts may be asked for media, and the one place where names become addresses.

A canonical host is ASCII (IDNA), lower case and without a trailing dot. Every spelling of an IPv4
address (decimal, octal, hexadecimal, shortened) has become the usual one.

Invariants:
  1. Every address of a name is checked. One that may not be asked refuses the name.
  2. The addresses that are returned are those that were checked: nothing is looked up again before
     connecting.
  3. A client can't distinguish a name that doesn't exist from one with a private address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from sensorium.multimodal.fetching.fetch import Fetch
from sensorium.types.errors import CapacityError, RequestError

_NAME = re.compile(r"(?!.{254})(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")


def canonical_host(host: str) -> str:
    """Return the canonical form of a host name or an address.

    Raise `ValueError` for anything else.
    """
    if ":" in host:
        if "%" in host:
            raise ValueError("an address with a zone is for this machine alone")
        return str(ipaddress.IPv6Address(host))
    host = host.lower().removesuffix(".")
    if not _NAME.fullmatch(host):
        raise ValueError("not a host name")
    # As browsers do: a name that ends in a number is an address or an error.
    return _respell_v4(host) if _NUMBER.fullmatch(host.rpartition(".")[2]) else host


def _respell_v4(host: str) -> str:
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        raise ValueError("not an IPv4 address") from None


class AllowedDomains:
    """The domains that may be asked for media.

    `example.com` allows that host alone. `.example.com` or `*.example.com` allows every host below
    it, but not itself. Without any entry all hosts are allowed.
    """

    def __init__(self, domains: frozenset[str]) -> None:
        names = [name.strip().removeprefix("*") for name in domains]
        self._hosts = {_parse_domain(name) for name in names if not name.startswith(".")}
        self._suffixes = tuple("." + _parse_domain(name[1:]) for name in names if name[:1] == ".")

    def has(self, host: str) -> bool:
        """Return True if this host, in its canonical form, may be asked."""
        if not self._hosts and not self._suffixes:
            return True
        return host in self._hosts or host.endswith(self._suffixes)


def _parse_domain(domain: str) -> str:
    try:
        ascii_domain = domain.strip("[]").encode("idna").decode("ascii")
        return canonical_host(ascii_domain)
    except ValueError:
        raise RequestError(f"an allowed media domain is a host alone, not {domain!r}") from None


# More than the fetches that can be under way by default. Only look-ups that were left behind, by
# clients that came and went, can fill the rest.
_MAX_LOOK_UPS = 1024


class LookUps:
    """The look-ups that run at this moment, including those that were left behind.

    The system's resolver blocks, may take half a minute for one name, and can't be interrupted. So
    each look-up has a thread of its own, and a slow name holds up no other one.
    """

    def __init__(
        self, resolve: Callable[[str, int], Sequence[str]], max_threads: int = _MAX_LOOK_UPS
    ) -> None:
        self._resolve = resolve
        self._room = asyncio.Semaphore(max_threads)

    async def find(self, host: str, port: int) -> Sequence[str]:
        """Return what the resolver returns, or raise what it raises."""
        loop = asyncio.get_running_loop()
        found: Future[Sequence[str]] = Future()
        found.set_running_or_notify_cancel()  # from here on it can't be cancelled, only ignored

        def run() -> None:
            try:
                found.set_result(self._resolve(host, port))
            except BaseException as error:  # raised where the answer is awaited
                found.set_exception(error)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._room.release)

        await self._room.acquire()
        try:
            # A daemon: a resolver that hangs must not keep the process from ending.
            threading.Thread(target=run, name="media-dns", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            self._room.release()
            raise CapacityError("no thread could be started to look up a media host") from error
        return await asyncio.wrap_future(found)


Resolve = Callable[[str, int], Sequence[str]]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Not public, although `is_global` of some Python releases is True: protocol assignments, and relays
# of 6to4 (RFC 7526).
_SPECIAL_V4 = [ipaddress.IPv4Network(net) for net in ("192.0.0.0/24", "192.88.99.0/24")]
# The only IPv6 space that is given out as public, without its special parts: protocol assignments
# with Teredo, 6to4 and documentation, of which two hold IPv4 addresses.
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6 = [ipaddress.IPv6Network(net) for net in ("2001::/23", "2002::/16", "3fff::/20")]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def resolve_host(host: str, port: int) -> list[str]:
    """Return all addresses that the system has for a name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_allowed(address: IPAddress, *, allow_private: bool) -> bool:
    address = _embedded_v4(address) or address
    if address.is_multicast or address.is_unspecified:
        return False
    return allow_private or _is_public(address)


def _embedded_v4(address: IPAddress) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address inside an IPv6 address, if it is of a kind that has one."""
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


class AddressGuard:
    """A resolver that checks what it finds. It is used on one event loop."""

    def __init__(self, resolve: Resolve, *, allow_private: bool) -> None:
        self._look_ups = LookUps(resolve)
        self._allow_private = allow_private

    async def look_up(self, host: str, port: int, fetch: Fetch) -> list[str]:
        """Return the checked addresses of `host`, in the order to try them."""
        addresses = self._parse(await self._find(host, port))
        if not addresses:
            raise fetch.refusal("leads to no public address", "dns")
        if not all(is_allowed(one, allow_private=self._allow_private) for one in addresses):
            raise fetch.refusal("leads to no public address", "address")
        return [str(address) for address in addresses]

    async def _find(self, host: str, port: int) -> Sequence[str]:
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            pass
        try:
            return await self._look_ups.find(host, port)
        except (OSError, UnicodeError):
            return []

    @staticmethod
    def _parse(found: Sequence[str]) -> list[IPAddress]:
        try:
            return [ipaddress.ip_address(address) for address in found]
        except ValueError:
            return []
