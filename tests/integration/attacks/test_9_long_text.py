"""Texts of megabytes are refused before they are tokenised, and cost the neighbours nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attacks.long_text import FLAGS, attack, make_bodies, make_text
from attacks.neighbours import Neighbours
from tests.support.server import POOL, ServerProcess, serve

pytestmark = pytest.mark.xdist_group("attack-long-text")

CONTEXT = 8192
LONGEST_TOKEN = 128  # characters for a token at most, where the vocabulary's longest has fewer
MANY = 16 * 2**20
BOUND_S = 60.0
MAX_GROWTH_KB = 1_000_000  # a text of 16 MB that is tokenised takes 3.8 GB


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve("sensorium-mini", *FLAGS, *POOL) as server:
        yield server


def get_peak_kb(server: ServerProcess) -> int:
    """The most memory that the frontend ever had."""
    (pid,) = server.find_children("frontend_main")
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("path", list(make_bodies("")))
def test_a_text_of_16_mb_is_refused_by_its_characters(server: ServerProcess, path: str) -> None:
    before_kb = get_peak_kb(server)
    response = server.post(path, make_bodies(make_text(MANY))[path])
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    num_tokens = 4 * CONTEXT if path == "/tokenize" else CONTEXT - 1
    assert re.search(
        rf"has 167\d{{5}} characters.* more than {num_tokens * LONGEST_TOKEN}$", message
    )
    assert f"{num_tokens} tokens" in message
    assert get_peak_kb(server) - before_kb < MAX_GROWTH_KB


@pytest.mark.parametrize("path", list(make_bodies("")))
def test_a_text_below_the_bound_is_counted_until_it_is_too_long(
    server: ServerProcess, path: str
) -> None:
    text = make_text(LONGEST_TOKEN * CONTEXT // 2)
    response = server.post(path, make_bodies(text)[path])
    assert response.status_code == 400, response.text
    assert "of them are more than the" in response.json()["error"]["message"]


def test_many_messages_are_refused_before_they_are_rendered(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "a"}] * 100_000
    response = server.post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == 400
    assert "100000 entries" in response.json()["error"]["message"]


def test_a_long_text_that_fits_is_answered(server: ServerProcess) -> None:
    text = make_text(9_000)
    counted = server.post("/tokenize", {"prompt": text}).json()["count"]
    assert counted < CONTEXT
    answer = server.post("/v1/completions", {"prompt": text, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == counted


def test_a_text_longer_than_the_context_can_be_counted(server: ServerProcess) -> None:
    counted = server.post("/tokenize", {"prompt": make_text(48_000)}).json()["count"]
    assert CONTEXT < counted < 4 * CONTEXT


@pytest.mark.slow  # in short: the refusals above
def test_neighbours_are_answered_while_four_clients_send_8_mb(server: ServerProcess) -> None:
    neighbours = Neighbours(server.get_url())
    began = time.monotonic()
    with attack(server.get_url()) as statuses:
        answers = neighbours.ask_while(lambda: time.monotonic() - began < 10, pause_s=0.5)
    assert neighbours.list_faults(answers) == []
    assert max(answer.seconds for answer in answers) < BOUND_S
    assert set(statuses) == {400}
