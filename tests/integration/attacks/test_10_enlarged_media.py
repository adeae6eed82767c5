"""Row 10: options of a request that make the processor enlarge a small picture.

They are refused before anything is decoded. With the flag that lifts the limit they run, and other
requests are still answered.
"""

from __future__ import annotations

from typing import Any

import pytest

from attacks.enlarged_media import (
    LIFTING_FLAG,
    OPTIONS,
    VIDEO_OPTIONS,
    ask,
    attack,
    make_picture_body,
    make_video_body,
)
from attacks.neighbours import Neighbours
from tests.support.media import make_clip, write_video
from tests.support.server import POOL, ServerProcess, serve

pytestmark = pytest.mark.xdist_group("mini")

MAX_SECONDS = 60.0
CLIP = write_video(make_clip(80, 64, 96))
# About 360 embeddings of a picture that has 64 otherwise.
LARGER = {"size": {"shortest_edge": 280_000, "longest_edge": 300_000}}


@pytest.fixture(scope="module")
def server(mini_server: ServerProcess) -> ServerProcess:
    return mini_server


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_larger_pictures_are_refused_with_their_options_and_numbers(
    server: ServerProcess, options: dict[str, Any]
) -> None:
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        response = server.post(path, make_picture_body(options))
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert f"option(s) {', '.join(sorted(options))} this image would become" in message
        assert "this server makes at most 64 embeddings" in message


@pytest.mark.parametrize("fields", VIDEO_OPTIONS, ids=str)
def test_larger_and_longer_videos_are_refused(
    server: ServerProcess, fields: dict[str, Any]
) -> None:
    response = ask(server.get_url(), make_video_body(CLIP, fields))
    assert response.status_code == 400, response.text
    assert "this video would become" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "options", [{"max_pixels": 30_000}, {"min_pixels": 784}, {"do_normalize": False}], ids=str
)
def test_options_that_ask_for_less_are_accepted(
    server: ServerProcess, options: dict[str, Any]
) -> None:
    response = ask(server.get_url(), make_picture_body(options))
    assert response.status_code == 200, response.text


def test_neighbours_are_answered_during_the_attack(server: ServerProcess) -> None:
    neighbours = Neighbours(server.get_url())
    with attack(server.get_url()) as refusals:
        answers = neighbours.ask_while(lambda: len(refusals) < 8)
    assert neighbours.list_faults(answers) == []
    assert all(answer.seconds < MAX_SECONDS for answer in answers)
    assert {response.status_code for response in refusals} == {400}


@pytest.mark.slow  # in short: tests/unit/multimodal/test_cost_guard.py
@pytest.mark.parametrize("num_items", [1, 3])
def test_with_the_flag_larger_items_run_and_neighbours_are_answered(num_items: int) -> None:
    # Steps so small that each of these items is beyond their budget.
    flags = (LIFTING_FLAG, "--max-num-batched-tokens", "128")
    with serve("sensorium-mini", *flags, *POOL) as server:
        neighbours = Neighbours(server.get_url())
        with attack(server.get_url(), (LARGER,)) as others:
            answers = neighbours.ask_while(lambda: len(others) < num_items)
        assert neighbours.list_faults(answers) == []
        assert all(answer.seconds < MAX_SECONDS for answer in answers)
        assert {response.status_code for response in others} == {200}
        assert all(r.json()["usage"]["prompt_tokens"] > 300 for r in others)
