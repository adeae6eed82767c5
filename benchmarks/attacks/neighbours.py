"""Three honest clients of a server: one sends text, one a cached picture, one a new picture.

They are the measure of an attack: what they are answered, and how long they wait. Every client
asks the same question again and again, so that a right answer is known from the first one.
"""

from __future__ import annotations

import base64
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx

KINDS = ("text", "cached picture", "new picture")
PICTURE = (
    Path(__file__).parents[2] / "src" / "sensorium" / "embedded" / "media" / "shapes.png"
).read_bytes()
_PAUSE_S = 0.1
_TIMEOUT_S = 300.0
_serial_numbers = count(time.time_ns())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a neighbour was answered, after how many seconds."""

    kind: str
    seconds: float
    status: int
    content: str


class Neighbours:
    """Three clients of the server at `url`, each in a thread of its own."""

    kinds = KINDS
    route = "/v1/chat/completions"

    def __init__(self, url: str, *, headers: dict[str, str] | None = None) -> None:
        self._url = url.rstrip("/") + self.route
        self._headers = headers or {}
        self.expected = {kind: self.ask(kind).content for kind in self.kinds}

    def make_request(self, kind: str) -> dict[str, Any]:
        """Return the body of a question, as an argument of `httpx.Client.post`."""
        return {"json": _make_body(kind)}

    def read_answer(self, answer: Any) -> str:
        """Return what was said in an answer with the status 200."""
        return str(answer["choices"][0]["message"]["content"])

    def ask(self, kind: str) -> Answer:
        """Ask once, and wait for the answer."""
        with self._make_client() as client:
            return self._ask(client, kind)

    def _make_client(self) -> httpx.Client:
        return httpx.Client(headers=self._headers, timeout=_TIMEOUT_S)

    def _ask(self, client: httpx.Client, kind: str) -> Answer:
        began = time.monotonic()
        response = client.post(self._url, **self.make_request(kind))
        seconds = time.monotonic() - began
        content = ""
        if response.status_code == 200:
            content = self.read_answer(response.json())
        return Answer(kind=kind, seconds=seconds, status=response.status_code, content=content)

    def ask_while(
        self, is_wanted: Callable[[], bool], *, min_rounds: int = 3, pause_s: float = _PAUSE_S
    ) -> list[Answer]:
        """Let all three ask while `is_wanted`, at least `min_rounds` times each."""
        answers: list[Answer] = []
        failures: list[Exception] = []

        def run(kind: str) -> None:
            num_asked = 0
            try:
                # One client for all questions, since making one takes as long as an answer.
                with self._make_client() as client:
                    while num_asked < min_rounds or is_wanted():
                        answers.append(self._ask(client, kind))
                        num_asked += 1
                        time.sleep(pause_s)
            except httpx.HTTPError as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(kind,)) for kind in self.kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return answers

    def list_faults(self, answers: Sequence[Answer]) -> list[str]:
        """Return one line for each answer that was refused or wrong."""
        return [
            f"{answer.kind}: {answer.status} {answer.content!r} after {answer.seconds:.1f} s"
            for answer in answers
            if answer.status != 200 or answer.content != self.expected[answer.kind]
        ]


def make_new_picture() -> bytes:
    """Return the sample picture as a file that no cache has seen: same pixels, other bytes."""
    content = b"Comment\0" + str(next(_serial_numbers)).encode()
    chunk = b"tEXt" + content
    encoded = struct.pack(">I", len(content)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    header_end = 8 + 4 + 4 + 13 + 4  # signature, then length, type, content and sum of IHDR
    return PICTURE[:header_end] + encoded + PICTURE[header_end:]


def make_picture_part(picture: bytes) -> dict[str, Any]:
    """Return the content part of a chat message that carries this picture."""
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def _make_body(kind: str) -> dict[str, Any]:
    if kind == "text":
        content: Any = "What is three plus four?"
    else:
        picture = PICTURE if kind == "cached picture" else make_new_picture()
        content = [make_picture_part(picture), {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}
