"""Row 21: the audio's length bounds the tokens of its transcript, even if a Whisper loops."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from attacks.endless_speech import FLAGS, ROUTE, OpenStreams, attack, make_attack, make_model
from attacks.endless_speech import make_request as make_form
from tests.support.server import POOL, ServerProcess, serve

pytestmark = pytest.mark.xdist_group("attack-21")

SECONDS = 0.4
TOKENS = "vllm:generation_tokens_total"
_DRAWN = 64 + 50 * SECONDS  # tokens of a text that is drawn at random


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = make_model(tmp_path_factory.mktemp("endless") / "whisper")
    with serve(model, *FLAGS, *POOL) as server:
        yield server


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        # The likeliest text, which has all the room; then others up to the limit, and one beyond.
        ({}, 448 + 6 * _DRAWN + _DRAWN),
        ({"temperature": "2"}, _DRAWN),
    ],
    ids=["greedy", "random"],
)
def test_a_transcript_has_no_more_tokens_than_the_audios_length_allows(
    server: ServerProcess, fields: dict[str, str], most: float
) -> None:
    form = make_attack(SECONDS)
    form["data"] |= fields
    before = server.get_metrics()[TOKENS]
    response = httpx.post(server.get_url(ROUTE), **form, timeout=300.0)
    assert response.status_code == 200, response.text
    num_tokens = server.get_metrics()[TOKENS] - before
    assert 0.7 * most < num_tokens <= most


def test_an_ordinary_recording_takes_a_few_tokens(server: ServerProcess) -> None:
    before = server.get_metrics()[TOKENS]
    response = httpx.post(server.get_url(ROUTE), **make_form(SECONDS), timeout=300.0)
    assert response.status_code == 200, response.text
    assert 0 < server.get_metrics()[TOKENS] - before < 40


@pytest.mark.slow  # in short: the tests above
def test_neighbours_of_endless_transcripts_are_answered(server: ServerProcess) -> None:
    listeners = OpenStreams(server.get_url())
    assert any(listeners.expected.values())
    with attack(server.get_url()) as statuses:
        answers = listeners.ask_while(lambda: not statuses, min_rounds=3)
    assert listeners.list_faults(answers) == []
    assert set(statuses) == {200}
