"""Data URLs as clients write them; what is too large is refused before it is decoded."""

from __future__ import annotations

import base64
import random
import tracemalloc
from urllib.parse import quote, quote_from_bytes

import pybase64
import pytest

from sensorium.multimodal.fetching import loader
from sensorium.multimodal.fetching.loader import decode_data_url
from sensorium.types.errors import MediaFetchError, RequestError

# Its base64 has `+`, `/` and padding.
MEDIA = bytes(range(256)) + b"\xfb\xff"
ENCODED = base64.b64encode(MEDIA).decode()


@pytest.mark.parametrize(
    "source",
    [
        f"data:image/png;base64,{ENCODED}",
        f"DATA:IMAGE/PNG;BASE64,{ENCODED}",
        f"data:;base64,{ENCODED}",
        f"data:image/png;name=a.png;base64,{ENCODED}",
        f"data:image/svg+xml;charset=utf-8; base64 ,{ENCODED}",
        f"data:image/png;base64,{ENCODED.rstrip('=')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(MEDIA).decode()}",
        f"data:image/png;base64,{base64.encodebytes(MEDIA).decode()}",
        f"data:image/png;base64, {ENCODED}\r\n",
        f"data:image/png;base64,{quote(ENCODED, safe='')}",
        f"data:image/png;base64,{quote(ENCODED, safe='').replace('%2B', '%2b')}",
        f"data:image/png;base64,{quote(base64.encodebytes(MEDIA).decode(), safe='')}",
        f"data:image/png,{quote_from_bytes(MEDIA, safe='')}",
        f"data:,{quote_from_bytes(MEDIA)}",
    ],
)
def test_every_usual_spelling_gives_the_same_bytes(source: str) -> None:
    assert decode_data_url(source, max_bytes=1000) == MEDIA


@pytest.mark.parametrize(
    "source",
    [
        "data:image/png;base64",
        "data:",
        "data:" + "x" * 2000 + ",",
        "data:;base64,A",
        "data:;base64,AAAA=AAAA",
        "data:;base64,AA!A",
        "data:;base64,AA%zzAA",
        "data:;base64,ÄÖÜß",
        "data:;base64,\ud800AAA",
        "data:,\ud800",
    ],
)
def test_what_is_malformed_is_the_caller_s_fault(source: str) -> None:
    with pytest.raises(RequestError, match="data URL") as caught:
        decode_data_url(source, max_bytes=1000)
    assert not isinstance(caught.value, MediaFetchError)


@pytest.mark.parametrize("num_bytes", [298, 299, 300])
@pytest.mark.parametrize("num_extra", [0, 1, 2, 3, 4])
def test_the_cap_is_exact(num_bytes: int, num_extra: int) -> None:
    source = "data:;base64," + base64.b64encode(bytes(num_bytes + num_extra)).decode()
    if num_extra:
        with pytest.raises(MediaFetchError, match=f"larger than {num_bytes} bytes"):
            decode_data_url(source, max_bytes=num_bytes)
    else:
        assert len(decode_data_url(source, max_bytes=num_bytes)) == num_bytes


def test_the_cap_is_exact_for_percent_encoding() -> None:
    assert decode_data_url("data:,%00%00%00", max_bytes=3) == bytes(3)
    for source in ("data:,%00%00%00%00", "data:,xxxx"):
        with pytest.raises(MediaFetchError, match="larger than 3 bytes"):
            decode_data_url(source, max_bytes=3)


@pytest.mark.parametrize("header", ["data:;base64,", "data:,"])
def test_what_is_far_too_large_is_neither_decoded_nor_copied(
    monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    monkeypatch.setattr(loader, "_decode_base64", pytest.fail)
    monkeypatch.setattr(loader, "unquote_to_bytes", pytest.fail)
    source = header + "A" * 10_000_000
    tracemalloc.start()
    with pytest.raises(MediaFetchError, match="larger"):
        decode_data_url(source, max_bytes=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_percent_encoded_content_may_not_cost_many_times_its_size() -> None:
    with pytest.raises(MediaFetchError, match="must be base64"):
        decode_data_url("data:," + "%" * (4 * 2**20 + 1), max_bytes=2**30)


def test_plain_base64_is_decoded_once_without_cleaning(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    decode = pybase64.b64decode
    monkeypatch.setattr(
        loader.pybase64, "b64decode", lambda *a, **k: calls.append(a) or decode(*a, **k)
    )
    monkeypatch.setattr(loader, "_normalise", pytest.fail)
    media = random.Random(0).randbytes(2_000_000)
    source = "data:image/png;base64," + base64.b64encode(media).decode()
    assert decode_data_url(source, max_bytes=len(media)) == media
    assert len(calls) == 1
