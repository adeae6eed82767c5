"""Hosts in one spelling, and which of them may be asked for media.

A canonical host is ASCII (IDNA), lower case, without a trailing dot; every spelling of an IPv4
address (decimal, octal, hexadecimal, shortened) has become the usual one.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from sensorium.types.errors import RequestError

_NAME = re.compile(r"(?!.{254})(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*")


def canonical_host(host: str) -> str:
    """Raises ValueError for what is neither a host name nor an address."""
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
    """`example.com` allows that host alone; `.example.com` or `*.example.com` every host below it,
    not itself. No entry at all allows any host.
    """

    def __init__(self, domains: frozenset[str]) -> None:
        names = [name.strip().removeprefix("*") for name in domains]
        self._hosts = {_parse_domain(name) for name in names if not name.startswith(".")}
        self._suffixes = tuple("." + _parse_domain(name[1:]) for name in names if name[:1] == ".")

    def has(self, host: str) -> bool:
        """`host` is canonical."""
        if not self._hosts and not self._suffixes:
            return True
        return host in self._hosts or host.endswith(self._suffixes)


def _parse_domain(domain: str) -> str:
    try:
        ascii_domain = domain.strip("[]").encode("idna").decode("ascii")
        return canonical_host(ascii_domain)
    except ValueError:
        raise RequestError(f"an allowed media domain is a host alone, not {domain!r}") from None
