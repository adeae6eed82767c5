"""Hosts are normalised, in URLs and in the list of allowed domains."""

from __future__ import annotations

import pytest

from sensorium.multimodal.fetching.hosts import AllowedDomains, canonical_host
from sensorium.multimodal.fetching.http_client import parse_media_url
from sensorium.types.errors import RequestError


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("a_b.example", "a_b.example"),
        ("1.example", "1.example"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0X7F.1", "127.0.0.1"),
        ("017700000001", "127.0.0.1"),
        ("0177.0.0.01", "127.0.0.1"),
        ("0", "0.0.0.0"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("::FFFF:127.0.0.1", "::ffff:7f00:1"),
    ],
)
def test_every_spelling_of_a_host_becomes_one(host: str, expected: str) -> None:
    # Python 3.13 writes mapped addresses with dots.
    assert canonical_host(host) in (expected, expected.replace("7f00:1", "127.0.0.1"))


@pytest.mark.parametrize(
    "host",
    [
        *["", ".", "a..b", ".a", "a b", "a%20b", "a/b", "256.0.0.1", "1.2.3.4.5", "a.1", "a.0x1"],
        *["08", "::g", "fe80::1%eth0", "a" * 64, "a." * 127 + "bc", "ä", "a\n", "127.0.0.1\n"],
    ],
)
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        canonical_host(host)


@pytest.mark.parametrize(
    ("domains", "host", "is_allowed"),
    [
        ([], "any.example", True),
        (["example.com"], "example.com", True),
        (["Example.COM."], "example.com", True),
        (["example.com"], "www.example.com", False),
        (["example.com"], "badexample.com", False),
        (["example.com"], "example.com.evil.net", False),
        ([".example.com"], "www.example.com", True),
        (["*.example.com"], "a.b.example.com", True),
        (["*.example.com"], "example.com", False),
        (["*.example.com"], "badexample.com", False),
        (["bücher.example"], "xn--bcher-kva.example", True),
        (["10.0.0.1"], "10.0.0.1", True),
        (["10.0.0.1"], "10.0.0.2", False),
        (["[::1]"], "::1", True),
        (["::1"], "::1", True),
        (["one.example", ".two.example"], "one.two.example", True),
    ],
)
def test_only_listed_domains_are_allowed(domains: list[str], host: str, is_allowed: bool) -> None:
    assert AllowedDomains(frozenset(domains)).has(host) is is_allowed


@pytest.mark.parametrize("domain", ["", "*", "*.", "https://example.com", "example.com/a", "a:80"])
def test_a_domain_that_could_never_match_is_refused(domain: str) -> None:
    with pytest.raises(RequestError, match="an allowed media domain must be a host"):
        AllowedDomains(frozenset({domain}))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("HTTP://Example.COM", "http://example.com"),
        ("http://example.com.:80/a?b#c", "http://example.com/a?b"),
        ("https://example.com:8443/ä b", "https://example.com:8443/%C3%A4%20b"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://0x7f.1:81/", "http://127.0.0.1:81/"),
        ("http://[0::1]/", "http://[::1]/"),
    ],
)
def test_urls_are_normalised(source: str, expected: str) -> None:
    assert str(parse_media_url(source)) == expected


@pytest.mark.parametrize(
    "source",
    [
        *["http://", "http:///a", "http:a", "http://user@host/", "http://:word@host/"],
        *["http://h:0/", "http://h:65536/", "http://h:x/", "http://[::1", "ftp://host/"],
        *["http://good.example\\@evil.example/", "http://exa%6dple.com/", "http://a b/"],
        *["http://h/\x00", "http://h/\ud800", "http://\uff11.1/", "http://h\r\nX: y/"],
        "http://host/" + "a" * 70_000,
    ],
)
def test_a_malformed_url_is_the_caller_s_fault(source: str) -> None:
    with pytest.raises(RequestError, match="the media URL is malformed"):
        parse_media_url(source)
