"""Which origins and hosts are let in, for every way in which a server may be reached."""

from __future__ import annotations

from typing import Any

import pytest

from sensorium.server.http.access import OriginPolicy
from sensorium.server.http.errors import ApiError
from tests.unit.server.standing_in import serve

HOST = "127.0.0.1:8000"


def is_let_in(policy: OriginPolicy, method: str = "POST", **headers: str) -> bool:
    named = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
    raw = [(name.encode(), value.encode()) for name, value in named.items()]
    scope: dict[str, Any] = {"type": "http", "method": method, "headers": raw}
    if method == "UPGRADE":
        scope = {"type": "websocket", "headers": raw}
    try:
        policy.check(scope)
    except ApiError as error:
        return error.status != 403
    return True


LOCAL = OriginPolicy(host="127.0.0.1")


@pytest.mark.parametrize(
    ("origin", "is_own"),
    [
        ("http://127.0.0.1:8000", True),
        ("https://127.0.0.1:8000", True),  # a proxy may speak https in front of it
        ("HTTP://127.0.0.1:8000", True),
        ("http://127.0.0.1", False),
        ("http://127.0.0.1:8001", False),
        ("http://localhost:8000", False),
        ("http://127.0.0.1:8000.evil.example", False),
        ("http://evil.example", False),
        ("null", False),
        ("", False),
        ("http://[broken", False),
        ("//127.0.0.1:8000x", False),
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS", "UPGRADE"])
def test_an_origin_is_the_host_or_foreign(origin: str, is_own: bool, method: str) -> None:
    assert is_let_in(LOCAL, method, origin=origin) == is_own


@pytest.mark.parametrize(
    ("site", "is_own"),
    [("same-origin", True), ("none", True), ("same-site", False), ("cross-site", False)],
)
@pytest.mark.parametrize("method", ["POST", "GET", "UPGRADE"])
def test_the_site_that_a_browser_names_decides(site: str, is_own: bool, method: str) -> None:
    assert is_let_in(LOCAL, method, sec_fetch_site=site) == is_own
    assert is_let_in(LOCAL, method, sec_fetch_site=site, origin="null") == is_own


def test_a_link_may_be_followed_but_no_form_sent_and_no_frame_shown() -> None:
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert is_let_in(LOCAL, "GET", **link)
    assert is_let_in(LOCAL, "HEAD", **link, sec_fetch_dest="document")
    assert not is_let_in(LOCAL, "POST", **link)
    assert not is_let_in(LOCAL, "UPGRADE", **link)
    assert not is_let_in(LOCAL, "GET", **link, sec_fetch_dest="iframe")


def test_allowed_origins_are_let_in() -> None:
    policy = OriginPolicy(host="127.0.0.1", allowed_origins=("https://a.example/", "null"))
    for origin in ("https://a.example", "HTTPS://A.example", "null"):
        assert is_let_in(policy, origin=origin, sec_fetch_site="cross-site")
    assert not is_let_in(policy, origin="http://a.example")
    assert not is_let_in(policy, origin="https://b.example")
    anything = OriginPolicy(host="127.0.0.1", allowed_origins=("*",))
    assert is_let_in(anything, origin="https://b.example", sec_fetch_site="cross-site")
    assert is_let_in(anything, "GET", sec_fetch_site="cross-site")


@pytest.mark.parametrize(
    ("listens_on", "allowed", "host", "is_own"),
    [
        ("127.0.0.1", (), "localhost:8000", True),
        ("127.0.0.1", (), "LOCALHOST.", True),
        ("127.0.0.1", (), "demo.localhost", True),
        ("127.0.0.1", (), "127.8.8.8:1", True),
        ("127.0.0.1", (), "[::1]:8000", True),
        ("127.0.0.1", (), "example.com", False),
        ("127.0.0.1", (), "localhost.evil.example", False),
        ("127.0.0.1", (), "127.0.0.1.evil.example", False),
        ("127.0.0.1", (), "10.0.0.1", False),
        ("127.0.0.1", (), "", False),
        ("::1", (), "[::1]", True),
        ("::1", (), "evil.example", False),
        ("localhost", (), "evil.example", False),
        ("127.0.0.1", ("example.com",), "example.com:443", True),
        ("127.0.0.1", ("example.com:443",), "example.com", True),
        ("127.0.0.1", ("example.com",), "sub.example.com", False),
        ("127.0.0.1", ("example.com",), "localhost", True),
        ("127.0.0.1", ("*",), "evil.example", True),
        ("0.0.0.0", (), "anything.example", True),
        ("0.0.0.0", ("example.com",), "example.com", True),
        ("0.0.0.0", ("example.com",), "anything.example", False),
        ("gpu.lan", (), "anything.example", True),
    ],
)
def test_a_host_is_one_of_the_names_of_the_server(
    listens_on: str, allowed: tuple[str, ...], host: str, is_own: bool
) -> None:
    policy = OriginPolicy(host=listens_on, allowed_hosts=allowed)
    assert is_let_in(policy, host=host) == is_own


def test_a_key_does_not_open_the_door_to_foreign_pages() -> None:
    with serve(api_key=("secret",), allowed_origins=("https://a.example",)) as running:
        key = {"authorization": "Bearer secret"}
        for origin, status in (("https://a.example", 200), ("https://b.example", 403)):
            headers = {**key, "origin": origin}
            assert running.get("/v1/models", headers=headers).status_code == status
            assert running.post("/reset_mm_cache", headers=headers).status_code == status
        assert running.engine.resets == ["mm"]


def test_a_body_needs_a_type_and_no_body_needs_none() -> None:
    with serve() as running:
        for path in ("/v1/completions", "/tokenize", "/reset_mm_cache", "/nothing"):
            refused = running.post(path, content=b'{"prompt": "a"}')
            assert refused.status_code == 400, path
            assert "Content-Type: application/json" in refused.json()["error"]["message"]
            chunked = running.post(path, content=iter([b'{"prompt": "a"}']))
            assert chunked.status_code == 400, path
        assert running.post("/reset_mm_cache").status_code == 200
        assert running.complete().status_code == 200
