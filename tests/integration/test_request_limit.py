"""The limit of concurrent requests holds for all frontends together, also when one is killed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.support.server import START_TIMEOUT_S, ServerProcess, kill, serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("request-limit")
LIMIT = 3
NUM_LOOKS = 8  # new connections: each frontend takes some


def make_body(max_tokens: int, *, stream: bool) -> dict[str, Any]:
    question = [{"role": "user", "content": "go on"}]
    return {"messages": question, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}


def ask(server: ServerProcess) -> int:
    return server.post("/v1/chat/completions", make_body(1, stream=False)).status_code


def begin(stack: ExitStack, server: ServerProcess) -> None:
    """Begin an answer that lasts until the stack is closed."""
    client = stack.enter_context(httpx.Client(timeout=240.0))
    url = server.get_url("/v1/chat/completions")
    answer = stack.enter_context(client.stream("POST", url, json=make_body(8000, stream=True)))
    assert answer.status_code == 200
    lines = answer.iter_lines()
    next(lines)
    stack.callback(lines.close)  # httpx ends the request when the iterator is collected


def test_all_frontends_count_together(tiny_model: Callable[[str], str]) -> None:
    flags = ("--api-server-count", "2", "--max-concurrent-requests", str(LIMIT))
    with serve(tiny_model("llama"), *flags, "--max-model-len", "8192") as server:
        with ExitStack() as stack:
            for _ in range(LIMIT):
                begin(stack, server)
            assert [ask(server) for _ in range(NUM_LOOKS)] == [429] * NUM_LOOKS
        wait_until(lambda: ask(server) == 200, "the requests have ended, but still count")
        with ExitStack() as stack:
            for _ in range(LIMIT):
                begin(stack, server)
            for pid in server.find_children("frontend_main"):
                kill(pid)
            # The requests of the frontends that were killed have ended with them.
            wait_until(lambda: _is_served(server), "killed requests count", START_TIMEOUT_S)


def _is_served(server: ServerProcess) -> bool:
    try:
        return ask(server) == 200
    except httpx.TransportError:
        return False  # no frontend listens yet
