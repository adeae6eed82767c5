"""What a client names belongs to its API key and its salt: no other key reads or blocks it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from attacks.foreign_uuids import ATTACKER, FLAGS, VICTIM, Client, make_chat
from attacks.neighbours import PICTURE, make_picture_part
from tests.support.server import POOL, ROOT, ServerProcess, serve

pytestmark = pytest.mark.xdist_group("attack-foreign-uuids")

OTHER = (ROOT / "src/sensorium/embedded/media/count.png").read_bytes()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Two frontends, which share their uuids through memory."""
    flags = (*FLAGS, "--api-server-count", "2", *POOL)
    with serve("sensorium-mini", *flags) as server:
        yield server


@pytest.fixture
def victim(server: ServerProcess) -> Client:
    return Client(server.get_url(), VICTIM)


@pytest.fixture
def attacker(server: ServerProcess) -> Client:
    return Client(server.get_url(), ATTACKER)


def get_text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def test_a_guessed_uuid_reveals_nothing(victim: Client, attacker: Client) -> None:
    text = get_text(victim.show("passport"))
    assert get_text(victim.show("passport", None)) == text
    guessed = attacker.show("passport", None)
    assert guessed.status_code == 409
    assert guessed.json()["error"]["missing"] == ["passport"]
    assert victim.show("passport", None, cache_salt="mine").status_code == 409


def test_a_uuid_that_another_key_uses_is_still_free(victim: Client, attacker: Client) -> None:
    squatted = get_text(attacker.show("logo", OTHER))
    text = get_text(victim.show("logo"))
    assert text != squatted
    assert get_text(victim.show("logo", None)) == text
    assert get_text(attacker.show("logo", None)) == squatted
    assert victim.show("logo", OTHER).status_code == 400  # by its own promise


def test_equal_pictures_are_processed_once_for_all_keys(victim: Client, attacker: Client) -> None:
    """Equal bytes are no secret between those who both have them."""
    get_text(victim.show("shared"))
    chat = make_chat(make_picture_part(PICTURE), trace=True)
    answer = attacker.post("/v1/chat/completions", chat).json()
    (item,) = answer["sensorium_trace"]["items"]
    assert item["processor"] == "hit", item


def test_a_hash_alone_finds_what_the_same_key_has_sent(victim: Client, attacker: Client) -> None:
    chat = make_chat(make_picture_part(PICTURE))
    body: Any = victim.post("/v1/chat/completions/render", chat).json()
    body["features"]["mm_hashes"] = {"image": ["my-name"]}
    assert victim.post("/inference/v1/generate", body).status_code == 200
    body["features"]["kwargs_data"] = None
    assert victim.post("/inference/v1/generate", body).status_code == 200
    guessed = attacker.post("/inference/v1/generate", body)
    assert guessed.status_code == 409
    assert guessed.json()["error"]["missing"] == ["my-name"]


def test_keys_share_uuids_if_the_server_is_configured_so() -> None:
    flags = (*FLAGS, "--share-uuids")
    with serve("sensorium-mini", *flags) as server:
        text = get_text(Client(server.get_url(), VICTIM).show("common"))
        assert get_text(Client(server.get_url(), ATTACKER).show("common", None)) == text
