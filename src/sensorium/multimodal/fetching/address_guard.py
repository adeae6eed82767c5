"""Which addresses may be asked for media, and the one place where names become addresses.

Invariants:
  1. Every address of a name is checked; one that may not be asked refuses the name.
  2. What is returned is what was checked: nothing is looked up again before connecting.
  3. A client can't tell a name that doesn't exist from one with a private address.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

from sensorium.multimodal.fetching.fetch import Fetch
from sensorium.multimodal.fetching.look_ups import LookUps

Resolve = Callable[[str, int], Sequence[str]]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Not for the public although `is_global` of some Python releases says so: protocol assignments,
# and relays of 6to4 (RFC 7526).
_SPECIAL_V4 = [ipaddress.IPv4Network(net) for net in ("192.0.0.0/24", "192.88.99.0/24")]
# The only IPv6 space that is given out as public, without its special parts: protocol assignments
# with Teredo, 6to4 and documentation, of which two hold IPv4 addresses.
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6 = [ipaddress.IPv6Network(net) for net in ("2001::/23", "2002::/16", "3fff::/20")]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def resolve_host(host: str, port: int) -> list[str]:
    """All addresses of a name, as the system knows them."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_allowed(address: IPAddress, *, allow_private: bool) -> bool:
    address = _embedded_v4(address) or address
    if address.is_multicast or address.is_unspecified:
        return False
    return allow_private or _is_public(address)


def _embedded_v4(address: IPAddress) -> ipaddress.IPv4Address | None:
    """The IPv4 host that an IPv6 address of this kind stands for."""
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
    """Looks names up and checks what they lead to. Used on one event loop."""

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
