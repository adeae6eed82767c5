"""Pages of other origins are refused on a server without a key; its own page is served."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from attacks.foreign_page import CHAT, REQUESTS, RESET, PageRequest
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("mini")

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def server(mini_server: ServerProcess) -> ServerProcess:
    return mini_server


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.name)
def test_a_request_of_a_foreign_page_is_refused(
    server: ServerProcess, request_: PageRequest
) -> None:
    answer = request_.send(server.get_url())
    assert answer.status_code in (400, 403), answer.text
    error = answer.json()["error"]
    if answer.status_code == 403:
        assert error["type"] == "permission_error"
        assert error["code"] in ("origin_not_allowed", "host_not_allowed")
    else:
        assert error["code"] == "unsupported_content_type"


def test_programs_and_the_servers_own_page_are_served(server: ServerProcess) -> None:
    url = urlsplit(server.get_url())
    own = {"origin": f"http://{url.netloc}"}
    fetch = {**own, "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    for headers in ({}, own, fetch):
        assert server.post(RESET, headers=headers).status_code == 200
        assert server.post(CHAT, BODY, headers=headers).status_code == 200
    for headers in ({}, link, {"sec-fetch-site": "none"}):
        assert server.get("/", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1", "[::1]:80"])
def test_requests_to_names_of_this_machine_are_served(server: ServerProcess, host: str) -> None:
    """Also by another port: a tunnel leads here from there."""
    assert server.get("/v1/models", headers={"host": host}).status_code == 200
