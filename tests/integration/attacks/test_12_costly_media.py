"""Row 12: media that is long work for a decoder keeps no other media waiting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attacks.costly_media import (
    NUM_FRAMES_BEYOND,
    NUM_FRAMES_WITHIN,
    SIDE,
    attack,
    make_skip_video,
    make_thin_png,
    send,
)
from attacks.neighbours import Neighbours
from tests.support.server import ServerProcess, serve
from tests.support.waiting import wait_until

# In short: test_work_estimate.py in tests/unit/multimodal, tests/integration/test_pool_order.py.
pytestmark = [pytest.mark.xdist_group("attack-12"), pytest.mark.slow]
BOUND_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server of its own: when it stops, whatever it still decodes ends."""
    with serve("sensorium-mini", "--mm-processor-pool-size", "2") as server:
        wait_until(
            lambda: server.get_metrics()["sensorium:pool_workers"] >= 2,
            "two processes for media are ready",
            timeout_s=480.0,
        )
        yield server


def test_a_video_of_too_many_pixels_is_refused_with_the_numbers(server: ServerProcess) -> None:
    video = make_skip_video(NUM_FRAMES_BEYOND)
    assert len(video) < 110_000
    response = send(server.get_url(), "video", "video/mp4", video)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"of {SIDE} x {SIDE}" in message
    assert "pixels" in message
    assert response.elapsed.total_seconds() < BOUND_S


def test_a_video_beyond_the_limits_costs_its_neighbours_nothing(server: ServerProcess) -> None:
    neighbours = Neighbours(server.get_url())
    with attack(server.get_url()) as running:
        answers = neighbours.ask_while(lambda: False, min_rounds=6)
    assert neighbours.list_faults(answers) == []
    assert max(answer.seconds for answer in answers) < BOUND_S
    assert set(running.statuses) == {400}


def test_a_long_video_within_the_limits_leaves_a_process_for_pictures(
    server: ServerProcess,
) -> None:
    """The neighbours are asked while the video is being decoded, which is seen in the metrics."""
    neighbours = Neighbours(server.get_url())
    with attack(server.get_url(), num_frames=NUM_FRAMES_WITHIN) as running:
        wait_until(
            lambda: server.get_metrics()["sensorium:pool_running"] >= 1, "a video is decoded"
        )
        answers = neighbours.ask_while(lambda: False, min_rounds=5)
        num_done_meanwhile = len(running.statuses)
        running.stop()
    assert neighbours.list_faults(answers) == []
    assert max(answer.seconds for answer in answers) < BOUND_S
    # The video is work that either ends well, or at its deadline; or it waited too long.
    assert set(running.statuses) <= {200, 400, 503}
    assert num_done_meanwhile < 40


def test_a_tiny_png_of_a_hundred_million_pixels_is_refused_at_once(server: ServerProcess) -> None:
    picture = make_thin_png()
    assert len(picture) < 100
    before = server.get_metrics()
    response = send(server.get_url(), "image", "image/png", picture)
    assert response.status_code == 400
    assert "1 x 100000000" in response.json()["error"]["message"]
    after = server.get_metrics()
    for outcome in ("done", "failed"):  # it never became a job
        name = f'sensorium:pool_jobs_total{{outcome="{outcome}"}}'
        assert after.get(name) == before.get(name)
