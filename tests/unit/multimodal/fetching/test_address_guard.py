"""Only public addresses are public, in whatever form they come."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

import pytest

from sensorium.multimodal.fetching.fetch import RefusedMediaError
from sensorium.multimodal.fetching.hosts import (
    AddressGuard,
    Resolve,
    is_allowed,
    resolve_host,
)

NOT_PUBLIC = (
    "the URL leads to an unknown host or to a non-public address (allowed only with "
    "--allow-private-media-addresses)"
)
PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "2a00:1450:4001:80b::200e"]
# Public IPv4 hosts as IPv6-only networks see them.
PUBLIC += ["64:ff9b::8.8.8.8", "::ffff:8.8.8.8"]
NETWORKS = ["127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "172.31.255.255"]
NETWORKS += ["192.168.1.1", "169.254.169.254", "100.64.0.1", "100.127.255.255", "0.1.2.3"]
NETWORKS += ["198.18.0.1", "192.0.2.1", "203.0.113.1", "240.0.0.1", "255.255.255.255"]
NETWORKS += ["192.0.0.9", "192.88.99.1", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1"]
NETWORKS += ["fec0::1", "2001:db8::1", "3fff::1", "100::1", "5f00::1", "4000::1", "::7f00:1"]
NETWORKS += ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"]
NETWORKS += ["64:ff9b:1::808:808", "2002:7f00:1::1", "2002:808:808::1"]
NETWORKS += ["2001:0:7f00:1::", "2001:0:808:808::f7f7:f7f7"]
NEVER = ["224.0.0.1", "224.0.1.1", "239.1.1.1", "ff02::1", "ff0e::1", "0.0.0.0", "::"]
NEVER += ["::ffff:224.0.1.1", "::ffff:0.0.0.0", "64:ff9b::e000:101"]


@pytest.mark.parametrize("allow_private", [False, True])
@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str, allow_private: bool) -> None:
    assert is_allowed(ipaddress.ip_address(address), allow_private=allow_private)


@pytest.mark.parametrize("address", NETWORKS)
def test_other_networks_are_allowed_only_on_request(address: str) -> None:
    assert not is_allowed(ipaddress.ip_address(address), allow_private=False)
    assert is_allowed(ipaddress.ip_address(address), allow_private=True)


@pytest.mark.parametrize("allow_private", [False, True])
@pytest.mark.parametrize("address", NEVER)
def test_addresses_that_are_no_single_host_are_never_allowed(
    address: str, allow_private: bool
) -> None:
    assert not is_allowed(ipaddress.ip_address(address), allow_private=allow_private)


def look_up(resolve: Resolve, host: str = "host.example") -> list[str]:
    async def run() -> list[str]:
        guard = AddressGuard(resolve, allow_private=False)
        return await guard.look_up(host, 80)

    return asyncio.run(run())


def find(*addresses: str) -> Resolve:
    return lambda *_: addresses


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        ([], "dns"),
        (["what?"], "dns"),
        (["127.0.0.1"], "address"),
        (["8.8.8.8", "10.0.0.1"], "address"),
        (["10.0.0.1", "8.8.8.8"], "address"),
        (["8.8.8.8", "::1"], "address"),
    ],
)
def test_one_bad_address_refuses_the_name(addresses: Sequence[str], reason: str) -> None:
    with pytest.raises(RefusedMediaError) as caught:
        look_up(find(*addresses))
    assert caught.value.reason == reason
    assert str(caught.value) == NOT_PUBLIC


def test_addresses_keep_the_order_of_the_resolver() -> None:
    found = ["2606:4700::1111", "8.8.8.8"]
    assert look_up(find(*found)) == found


def test_an_address_is_not_looked_up() -> None:
    assert look_up(pytest.fail, "8.8.8.8") == ["8.8.8.8"]
    with pytest.raises(RefusedMediaError, match="non-public address"):
        look_up(pytest.fail, "::1")


@pytest.mark.parametrize("error", [socket.gaierror(-2, "10.0.0.1"), UnicodeError("label")])
def test_a_look_up_that_fails_says_no_more_than_that(error: Exception) -> None:
    def fail(*_: object) -> Sequence[str]:
        raise error

    with pytest.raises(RefusedMediaError) as caught:
        look_up(fail)
    assert str(caught.value) == NOT_PUBLIC


def test_the_system_s_answers_are_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_two(_: str, port: int, **__: object) -> list[object]:
        v4 = (socket.AF_INET, 1, 6, "", ("8.8.8.8", port))
        return [v4, v4, (socket.AF_INET6, 1, 6, "", ("2606:4700::1111", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", find_two)
    assert resolve_host("host.example", 80) == ["8.8.8.8", "2606:4700::1111"]
