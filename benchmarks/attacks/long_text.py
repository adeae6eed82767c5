"""Texts of megabytes that no context can hold, on every route that tokenises.

A server that tokenises a text before it looks at its length spends seconds and gigabytes on each.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

FLAGS: tuple[str, ...] = ()
TEXT = "The quick brown fox jumps over the lazy dog, 12 times. "
_NUM_CLIENTS = 4
_PAUSE_S = 2.0  # between two requests of a client: these are attacks by length, not by number
_MAX_REQUESTS = 200  # of each client, so that the attack ends by itself
_TIMEOUT_S = 300.0


def make_text(num_characters: int) -> str:
    """Return ordinary words of this length."""
    return (TEXT * (num_characters // len(TEXT) + 1))[:num_characters]


def make_bodies(text: str) -> dict[str, dict[str, Any]]:
    """Return a request with this text for each route that tokenises, by path."""
    chat = {"messages": [{"role": "user", "content": text}]}
    return {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": ["a few words", text]},
        "/v1/chat/completions/render": chat,
        "/v1/completions/render": {"prompt": text},
        "/tokenize": chat,
    }


@contextmanager
def attack(url: str, num_characters: int = 8 * 2**20) -> Iterator[list[int]]:
    """Send chats of this length from four clients. The list fills with the answers' statuses."""
    body = json.dumps(make_bodies(make_text(num_characters))["/v1/chat/completions"]).encode()
    statuses: list[int] = []
    is_over = threading.Event()

    def run() -> None:
        headers = {"Content-Type": "application/json"}
        with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S) as client:
            for _ in range(_MAX_REQUESTS):
                answer = client.post("/v1/chat/completions", content=body)
                statuses.append(answer.status_code)
                if is_over.wait(_PAUSE_S):
                    return

    threads = [threading.Thread(target=run) for _ in range(_NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
