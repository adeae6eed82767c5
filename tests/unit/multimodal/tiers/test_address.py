"""Addresses of a Redis: which are taken, and that their passwords are never shown."""

from __future__ import annotations

import pytest

from sensorium.engine.assembly.options import MediaOptions
from sensorium.multimodal.tiers.address import parse_address
from sensorium.types.errors import ModelError


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache", "redis://cache"),
        ("redis://cache:6380/3", "redis://cache:6380/3"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://:hunter2@cache:6379/0", "redis://cache:6379/0"),
        ("redis://me:hunter2@cache/", "redis://cache"),
        ("redis://me:hun%2Fter2@cache?db=3", "redis://cache"),
        ("redis://cache?password=hunter2", "redis://cache"),
        ("rediss://me:hunter2@cache:1/2?ssl_ca_certs=/ca.pem", "rediss://cache:1/2"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("unix://me:hunter2@/run/redis.sock?db=1", "unix:///run/redis.sock"),
        ("unix:///run/redis.sock?password=hunter2", "unix:///run/redis.sock"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, shown: str) -> None:
    address = parse_address(url)
    assert address.url == url
    assert str(address) == shown
    assert "hun" not in repr(address)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hunter2",
        "cache:6379",
        "http://:hunter2@cache",
        "redis://",
        "redis://:hunter2@",
        "redis://:hunter2@cache:port",
        "redis://:hunter2@cache:0",
        "redis://:hunter2@cache:65536",
        "redis://:hunter2@cache/first",
        "redis://:hunter2@cache/0/1",
        "redis://:hun/ter2@cache",  # the port seems to be "hun"
        "redis://:hun?ter2@cache",
        "redis://:hun#ter2@cache",
        "redis://cache#hunter2",
        "redis://[hunter2",
        "redis://cache?db=hunter2",
        "redis://cache?socket_timeout=1000&password=hunter2",
        "redis://cache?ssl_ca_certs=hunter2",
        "unix://hunter2/run/redis.sock",
        "unix://",
        "unix:///",
    ],
)
def test_what_is_no_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ModelError, match="mm_remote_cache is no address of a Redis") as caught:
        MediaOptions(mm_remote_cache=url)
    assert "hun" not in str(caught.value)
    assert "ter2" not in str(caught.value)


def test_options_never_show_the_address() -> None:
    assert "hunter2" not in repr(MediaOptions(mm_remote_cache="redis://:hunter2@cache"))
    with pytest.raises(ModelError, match=r"mm_remote_cache must be text$"):
        MediaOptions(mm_remote_cache=b"redis://:hunter2@cache")  # type: ignore[arg-type]
