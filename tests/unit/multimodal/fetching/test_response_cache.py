"""What was used least recently goes first, and the bytes always add up."""

from __future__ import annotations

import random

from sensorium.multimodal.fetching.hosts import CachedResponse, ResponseCache
from sensorium.multimodal.media import MediaBytes

NOW = 1000.0
FRESH = {"cache-control": "max-age=60"}
HEADER_BYTES = len("max-age=60")


def respond(num_bytes: int, headers: dict[str, str] | None = None) -> CachedResponse:
    return CachedResponse.receive(MediaBytes(bytes(num_bytes)), headers or FRESH, NOW)


def test_the_least_recently_used_response_goes_first() -> None:
    cache = ResponseCache(3 * (1 + 100 + HEADER_BYTES))
    for url in "abc":
        cache.replace(url, respond(100), NOW)
    assert cache.get("a") is not None
    cache.replace("d", respond(100), NOW)
    assert [url for url in "abcd" if cache.get(url)] == ["a", "c", "d"]


def test_a_response_larger_than_the_cache_evicts_nothing() -> None:
    cache = ResponseCache(200)
    cache.replace("a", respond(100), NOW)
    cache.replace("b", respond(200), NOW)
    assert cache.get("a") is not None
    assert cache.get("b") is None


def test_a_response_that_may_not_be_stored_removes_the_stored_one() -> None:
    cache = ResponseCache(1000)
    cache.replace("a", respond(100), NOW)
    cache.replace("a", respond(100, {"cache-control": "no-store"}), NOW)
    assert cache.get("a") is None
    assert cache.weight == 0


def test_a_cache_without_room_keeps_nothing() -> None:
    cache = ResponseCache(0)
    cache.replace("", CachedResponse.receive(MediaBytes(b"x"), FRESH, NOW), NOW)
    assert cache.get("") is None


def test_a_stale_response_with_an_etag_is_kept_for_revalidation() -> None:
    cache = ResponseCache(1000)
    cache.replace("named", respond(1, {"etag": '"a"'}), NOW)
    cache.replace("unnamed", respond(1, {"content-type": "image/png"}), NOW)
    named = cache.get("named")
    assert named is not None
    assert (named.fresh_until, named.validators) == (NOW, {"If-None-Match": '"a"'})
    assert cache.get("unnamed") is None


def test_a_confirmation_brings_new_headers_and_keeps_the_content() -> None:
    old = respond(10, {"etag": '"a"', "age": "50", "content-type": "image/png", **FRESH})
    new = old.confirm({"cache-control": "max-age=10", "x-other": "y"}, NOW + 100)
    assert new.media is old.media
    assert new.fresh_until == NOW + 110
    assert dict(new.headers) == {
        "cache-control": "max-age=10",
        "content-type": "image/png",
        "etag": '"a"',
    }


def test_the_cached_bytes_are_always_counted_right() -> None:
    rng = random.Random(0)
    cache = ResponseCache(1000)
    sizes: dict[str, int] = {}
    for _ in range(2000):
        url = rng.choice("abcdefghij")
        sizes[url] = rng.randrange(400)
        cache.replace(url, respond(sizes[url], rng.choice([FRESH, {"vary": "*"}])), NOW)
        kept = [found for url in sizes if (found := cache.get(url)) is not None]
        assert cache.weight == sum(1 + response.num_bytes for response in kept) <= 1000
    cache.clear()
    assert cache.weight == 0
    assert cache.get("a") is None
