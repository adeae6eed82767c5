"""How long an answer is good, from its headers alone."""

from __future__ import annotations

from email.utils import formatdate

import pytest

from sensorium.multimodal.fetching.hosts import (
    CachedResponse,
    compute_fresh_until,
    is_storable,
)
from sensorium.multimodal.media import MediaBytes

NOW = 1_800_000_000.0
DECADE_S = 10 * 365 * 86400


def date(offset_s: float) -> str:
    return formatdate(NOW + offset_s, usegmt=True)


@pytest.mark.parametrize(
    ("headers", "lifetime_s"),
    [
        ({}, 0),
        ({"cache-control": "max-age=60"}, 60),
        ({"cache-control": "Public , MAX-AGE = 60"}, 60),
        ({"cache-control": 'max-age="60"'}, 60),
        ({"cache-control": "max-age=60, s-maxage=10"}, 10),
        ({"cache-control": "max-age=60, max-age=90"}, 60),
        ({"cache-control": "max-age=60", "age": "20"}, 40),
        ({"cache-control": "max-age=60", "age": "90"}, -30),
        ({"cache-control": "max-age=60", "date": date(-15)}, 45),
        ({"cache-control": "max-age=60", "date": date(-15), "age": "20"}, 40),
        ({"cache-control": "max-age=60", "date": date(+15)}, 60),
        ({"cache-control": "max-age=60", "date": "yesterday", "age": "old"}, 60),
        ({"cache-control": "max-age=60", "expires": date(500)}, 60),
        ({"cache-control": "max-age=-60"}, 0),
        ({"cache-control": "max-age=soon"}, 0),
        ({"cache-control": "max-age"}, 0),
        ({"cache-control": "max-age=" + "9" * 5000}, DECADE_S),
        ({"cache-control": "no-cache, max-age=60"}, 0),
        ({"cache-control": 'no-cache="set-cookie", max-age=60'}, 0),
        ({"expires": date(30)}, 30),
        ({"expires": date(30), "date": date(-10)}, 30),
        ({"expires": date(-30)}, -30),
        ({"expires": "0"}, 0),
        ({"expires": "Mon, 99 Foo 9999 99:99:99 GMT"}, 0),
        ({"last-modified": date(-1000)}, 0),
    ],
)
def test_an_answer_is_fresh_for_as_long_as_it_says(
    headers: dict[str, str], lifetime_s: float
) -> None:
    assert compute_fresh_until(headers, NOW) - NOW == pytest.approx(lifetime_s)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, True),
        ({"cache-control": "public, max-age=60"}, True),
        ({"cache-control": "max-age=60, No-Store"}, False),
        ({"cache-control": "private"}, False),
        ({"cache-control": 'private="x-user", max-age=60'}, False),
        ({"cache-control": "max-age=60, extension=no-store"}, True),
        ({"vary": "*"}, False),
        ({"vary": "accept, *"}, False),
        ({"vary": "accept-encoding, cookie"}, True),
    ],
)
def test_only_shareable_responses_are_stored(headers: dict[str, str], expected: bool) -> None:
    assert is_storable(headers) is expected


def test_a_response_is_revalidated_by_its_own_validators() -> None:
    headers = {"etag": '"a"', "last-modified": date(0), "age": "1"}
    expected = {"If-None-Match": '"a"', "If-Modified-Since": date(0)}
    assert CachedResponse.receive(MediaBytes(b""), headers, NOW).validators == expected
    assert CachedResponse.receive(MediaBytes(b""), {"etag": ""}, NOW).validators == {}
