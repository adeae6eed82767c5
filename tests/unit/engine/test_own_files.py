"""Strings among the media of a caller in this process are paths where they are no URLs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from sensorium.engine.inputs.own_files import find_paths
from sensorium.engine.inputs.renderer import Chat
from sensorium.render.messages import ChatOptions

PIXELS = object()
URLS = ("data:image/png;base64,AAAA", "DATA:,x", "http://a/b", "HTTPS://a/b", "file:///a", "s3://a")


def find_in(*parts: Any) -> list[Any]:
    messages = [{"role": "user", "content": list(parts)}, {"role": "user", "content": "a.png"}]
    before = copy.copy(messages[0]["content"])
    chat = find_paths(Chat(messages=messages, options=ChatOptions(), fields={}))
    assert isinstance(chat, Chat)
    assert messages[0]["content"] == before  # the caller's own
    found: Any = chat.messages
    assert found[1] == messages[1]
    return list(found[0]["content"])


@pytest.mark.parametrize("modality", ["image", "audio", "video"])
def test_a_string_is_a_path_unless_it_is_a_url(modality: str) -> None:
    for name in (modality, "path"):
        (part,) = find_in({"type": modality, name: "dir/a.b", "uuid": "x"})
        assert part == {"type": modality, name: Path("dir/a.b"), "uuid": "x"}
    for other in (*URLS, Path("/a"), PIXELS, b"bytes", None):
        assert find_in({"type": modality, modality: other}) == [{"type": modality, modality: other}]
    prompt: Any = {"prompt": "a.png", "multi_modal_data": {modality: "a.b"}}
    expected = {"prompt": "a.png", "multi_modal_data": {modality: Path("a.b")}}
    assert find_paths(prompt) == expected
    prompt["multi_modal_data"] = {modality: ["a.b", PIXELS, URLS[0]]}
    expected["multi_modal_data"] = {modality: [Path("a.b"), PIXELS, URLS[0]]}
    assert find_paths(prompt) == expected


def test_openai_content_parts_have_no_paths() -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": "/a.png"}},
        {"type": "image_url", "image_url": "/a.png"},
        {"type": "input_audio", "input_audio": {"data": "/a.wav"}},
        {"type": "text", "text": "/a.png"},
        "/a.png",
    ):
        assert find_in(part) == [part]


def test_what_is_malformed_stays_as_it_is() -> None:
    for part in (None, 1, {}, {"type": None}, {"type": ["image"]}, {"type": "image"}):
        assert find_in(part) == [part]
    for messages in (None, "text", [None], [{}], [{"content": None}], {"content": []}):
        chat = Chat(messages=messages, options=ChatOptions(), fields={})
        assert find_paths(chat) == chat
    odd: Any
    for odd in ("text", [1, 2], None, {"prompt": "x", "multi_modal_data": "a.png"}):
        assert find_paths(odd) == odd
