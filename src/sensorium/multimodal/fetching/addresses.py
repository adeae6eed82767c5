"""Decides which hosts may be asked for media. Names become addresses only here.

A canonical host is ASCII (IDNA), lower case and without a trailing dot. All spellings of an IPv4
address (decimal, octal, hexadecimal, shortened) become the usual one.

Invariants:
  1. Every address of a name is checked. If one may not be asked, the name is refused.
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

from sensorium.multimodal.fetching.fetch import RefusedMediaError
from sensorium.types.errors import CapacityError, RequestError

_NAME = re.compile(r"(?!.{254})(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")


def canonical_host(host: str) -> str:
    """Return the canonical form of a host name or an address.

    Raise `ValueError` for anything else.
    """
    if ":" in host:
        if "%" in host:
            raise ValueError("an address with a zone has a meaning on this machine only")
        return str(ipaddress.IPv6Address(host))
    host = host.lower().removesuffix(".")
    if not _NAME.fullmatch(host):
        raise ValueError("not a host name")
    # As in browsers, a name that ends in a number is an address or an error.
    if not _NUMBER.fullmatch(host.rpartition(".")[2]):
        return host
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


Resolve = Callable[[str, int], Sequence[str]]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# These networks are not public, although some Python releases call them global: protocol
# assignments, and relays of 6to4 (RFC 7526).
_SPECIAL_V4 = [ipaddress.IPv4Network(net) for net in ("192.0.0.0/24", "192.88.99.0/24")]
# All public IPv6 addresses are in this network, apart from its special parts: protocol assignments
# with Teredo, 6to4 (both contain IPv4 addresses), and documentation.
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6 = [ipaddress.IPv6Network(net) for net in ("2001::/23", "2002::/16", "3fff::/20")]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def resolve_host(host: str, port: int) -> list[str]:
    """Return all addresses that the system has for a name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_allowed(address: IPAddress, *, allow_private: bool) -> bool:
    """Return True if a connection to this address may be made."""
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


# This is more than the fetches that can be under way by default. The rest is for look-ups that
# outlive their clients.
_MAX_LOOK_UPS = 1024


class AddressGuard:
    """A resolver that checks what it finds. It is used on one event loop.

    The system's resolver blocks, may take half a minute for one name, and can't be interrupted. So
    each look-up has a thread of its own, and a slow name delays no other one.
    """

    def __init__(
        self, resolve: Resolve, *, allow_private: bool, max_look_ups: int = _MAX_LOOK_UPS
    ) -> None:
        self._resolve = resolve
        self._allow_private = allow_private
        # A look-up has a place here until its thread ends, also when its fetch was cancelled.
        self._places = asyncio.Semaphore(max_look_ups)

    async def look_up(self, host: str, port: int) -> list[str]:
        """Return the checked addresses of `host`, in the order to try them.

        Raise `RefusedMediaError` if there are none, or if one of them may not be asked.
        """
        try:
            addresses = [ipaddress.ip_address(host)]
        except ValueError:
            addresses = await self._find(host, port)
        # Both refusals have one text, so that a client can't find out which private names exist.
        if not addresses:
            raise RefusedMediaError("leads to no public address", "dns")
        if not all(is_allowed(one, allow_private=self._allow_private) for one in addresses):
            raise RefusedMediaError("leads to no public address", "address")
        return [str(address) for address in addresses]

    async def _find(self, host: str, port: int) -> list[IPAddress]:
        """Return the addresses of a name, or none if the resolver fails."""
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
            raise CapacityError("no thread could be started to look up a media host") from error
        try:
            return [ipaddress.ip_address(one) for one in await asyncio.wrap_future(found)]
        except (OSError, ValueError):  # ValueError: a name that has no encoding, or no address
            return []
