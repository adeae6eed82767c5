"""Texts of megabytes that no context can hold, on every route that tokenises.

A server that tokenises a text before it looks at its length spends seconds and gigabytes on each.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

import httpx

from attacks.asking import keep_asking

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


def attack(url: str, num_characters: int = 8 * 2**20) -> AbstractContextManager[list[int]]:
    """Send chats of this length from four clients. The list fills with the answers' statuses."""
    body = json.dumps(make_bodies(make_text(num_characters))["/v1/chat/completions"]).encode()

    def ask(client: httpx.Client) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return client.post("/v1/chat/completions", content=body, headers=headers)

    return keep_asking(
        url,
        ask,
        num_clients=_NUM_CLIENTS,
        max_requests=_MAX_REQUESTS,
        timeout_s=_TIMEOUT_S,
        pause_s=_PAUSE_S,
    )
