"""Row 24: prompts that almost fill the context let their neighbours have the steps between."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from attacks.long_prompts import FLAGS, NUM_TOKENS, attack
from attacks.neighbours import Neighbours
from tests.support.server import SHARED_SERVERS
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("mini")
PATIENCE_S = 300.0  # only against hangs


def test_a_short_prompt_is_answered_before_a_long_one_that_came_first() -> None:
    with SHARED_SERVERS.use("sensorium-mini", *FLAGS) as server:
        answers: list[tuple[str, int]] = []

        def ask(name: str, prompt: Any, num_tokens: int) -> None:
            body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
            url = server.get_url("/v1/completions")
            answers.append((name, httpx.post(url, json=body, timeout=PATIENCE_S).status_code))

        prompt = [300 + 7 * number % 3001 for number in range(NUM_TOKENS // 3)]
        long = threading.Thread(target=ask, args=("long", prompt, 1))
        long.start()
        wait_until(
            lambda: server.get_metrics()["vllm:num_requests_running"] >= 1,
            "the long prompt is being computed",
        )
        ask("short", "A picture of", 4)
        long.join()
        assert answers == [("short", 200), ("long", 200)]


@pytest.mark.slow  # in short: the test above
def test_neighbours_of_long_prompts_are_answered() -> None:
    with SHARED_SERVERS.use("sensorium-mini", *FLAGS) as server:
        neighbours = Neighbours(server.get_url())
        with attack(server.get_url()) as statuses:
            answers = neighbours.ask_while(lambda: len(statuses) < 2, min_rounds=3)
        assert neighbours.list_faults(answers) == []
        assert set(statuses) == {200}
