"""Every shape of a message that clients send, and what is said of a wrong one."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sensorium.multimodal.media import MediaItem
from sensorium.render.messages import Message, get_media, parse_messages
from sensorium.types.errors import RequestError

URL = "data:image/png;base64,AAAA"
IMAGE = Image.new("RGB", (4, 4))
SAMPLES = np.zeros(16, dtype=np.float32)
RAW = b"RIFF some bytes"
BASE64 = base64.b64encode(RAW).decode()


def parse_one(part: object) -> object:
    (message,) = parse_messages([{"role": "user", "content": [part]}])
    assert isinstance(message.content, tuple)
    return message.content[0]


@pytest.mark.parametrize(
    ("part", "modality", "item"),
    [
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, "image", URL),
        ({"type": "image_url", "image_url": URL}, "image", URL),
        ({"type": "audio_url", "audio_url": {"url": URL}}, "audio", URL),
        ({"type": "video_url", "video_url": {"url": URL}}, "video", URL),
        ({"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}, "audio", RAW),
        ({"type": "input_audio", "input_audio": {"data": URL}}, "audio", URL),
        ({"type": "image", "image": IMAGE}, "image", IMAGE),
        ({"type": "image", "image": RAW}, "image", RAW),
        ({"type": "image", "url": URL}, "image", URL),
        ({"type": "image", "base64": BASE64}, "image", RAW),
        ({"type": "image", "path": "/a b/c.png"}, "image", "file:///a%20b/c.png"),
        ({"type": "image", "image": Path("/d.png")}, "image", Path("/d.png")),
        ({"type": "image", "path": Path("/d.png")}, "image", Path("/d.png")),
        ({"type": "image_pil", "image_pil": IMAGE}, "image", IMAGE),
        ({"type": "audio", "audio": SAMPLES}, "audio", SAMPLES),
        ({"type": "video", "video": SAMPLES, "fps": 2}, "video", SAMPLES),
    ],
)
def test_a_media_part_gives_its_item_as_it_came(
    part: Mapping[str, Any], modality: str, item: object
) -> None:
    parsed = parse_one(part)
    assert isinstance(parsed, MediaItem)
    assert (parsed.modality, parsed.uuid) == (modality, None)
    assert parsed.media is item or parsed.media == item


def test_a_url_is_the_callers_own_string_and_not_a_copy() -> None:
    url = "data:image/png;base64," + "A" * 1000
    part = parse_one({"type": "image_url", "image_url": {"url": url}})
    assert isinstance(part, MediaItem)
    assert part.media is url


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None, "uuid": "a"},
        {"type": "image_url", "uuid": "a"},
        {"type": "image_url", "image_url": {"url": None}, "uuid": "a"},
        {"type": "image", "image": None, "uuid": "a"},
        {"type": "image", "uuid": "a"},
    ],
)
def test_a_uuid_may_stand_for_the_media(part: Mapping[str, Any]) -> None:
    assert parse_one(part) == MediaItem(path=(), modality="image", media=None, uuid="a")


@pytest.mark.parametrize("part", ["hello", {"type": "text", "text": "hello", "more": 1}])
def test_text_may_be_a_part_or_a_plain_string(part: object) -> None:
    assert parse_one(part) == "hello"


BAD_PARTS: list[tuple[object, str]] = [
    (7, r"messages\[0\].content\[0\]: must be an object, not int"),
    ({"text": "no type"}, r"content\[0\].type: must be a string"),
    ({"type": "text"}, r"content\[0\].text: must be a string, not NoneType"),
    ({"type": "text", "text": ["a"]}, r"content\[0\].text: must be a string, not list"),
    ({"type": "hologram"}, r"content\[0\].type: 'hologram' is unknown \(known: text, image_url"),
    ({"type": "image_url"}, r"content\[0\]: has neither media nor a uuid"),
    ({"type": "image"}, r"content\[0\]: has neither media nor a uuid"),
    (
        {"type": "image_url", "image_url": {"url": 5}},
        r"messages\[0\].content\[0\].image_url.url: must be a string, not int",
    ),
    (
        {"type": "image_url", "image_url": 5},
        r"image_url: must be a URL, or an object with a url, not int",
    ),
    ({"type": "input_audio", "input_audio": "AAAA"}, r"input_audio: must be an object with data"),
    (
        {"type": "input_audio", "input_audio": {"data": "%%"}},
        r"content\[0\].input_audio.data: is not valid base64",
    ),
    (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": 3}},
        r"input_audio.format: must be a string",
    ),
    (
        {"type": "image", "image": IMAGE, "uuid": 3},
        r"content\[0\].uuid: must be a string of 1 to 128",
    ),
    (
        {"type": "image", "image": IMAGE, "uuid": ""},
        r"content\[0\].uuid: must be a string of 1 to 128",
    ),
    ({"type": "image", "path": 3}, r"content\[0\].path: must be a string"),
    ({"type": "image_embeds"}, r"content\[0\]: has neither media nor a uuid"),
    (
        {"type": "image_embeds", "image_embeds": {"pixels": "AAAA"}},
        r"content\[0\].image_embeds: must be base64 or a tensor, not dict",
    ),
    (
        {"type": "audio_embeds", "audio_embeds": "%%"},
        r"content\[0\].audio_embeds: is not valid base64",
    ),
    (
        {"type": "image_embeds", "image_embeds": "gAJjb3MKc3lzdGVtCg=="},
        r"content\[0\].image_embeds: embeddings can't be decoded: they must be msgpack",
    ),
    (
        {"type": "image_embeds", "image_embeds": torch.zeros(4)},
        r"content\[0\].image_embeds: embeddings must have the shape",
    ),
]


@pytest.mark.parametrize(("part", "reason"), BAD_PARTS)
def test_a_wrong_part_is_refused_by_the_name_of_its_field(part: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        parse_one(part)


BAD_MESSAGES: list[tuple[object, str]] = [
    ("hello", "messages: must be a list, not str"),
    ([], "messages: must not be empty"),
    (["hello"], r"messages\[0\]: must be an object, not str"),
    ([{"content": "a"}], r"messages\[0\].role: must be one of system, developer, user"),
    ([{"role": "wizard", "content": "a"}], r"messages\[0\].role: must be one of"),
    ([{"role": ["user"], "content": "a"}], r"messages\[0\].role: must be one of"),
    ([{"role": "user"}], r"messages\[0\].content: must be a string or a list of parts"),
    ([{"role": "user", "content": 5}], r"messages\[0\].content: must be .*, not int"),
    (
        [{"role": "user", "content": "a"}, {"role": "assistant", "name": "x"}],
        r"messages\[1\].content: must be a string",
    ),
    ([{"role": "user", "content": "a", "name": 5}], r"messages\[0\].name: must be a string"),
    (
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        r"messages\[0\].tool_calls: must be a list, not dict",
    ),
    ([{"role": "assistant", "tool_calls": [1]}], r"tool_calls\[0\]: must be an object"),
    ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\].function: must be an object"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        r"tool_calls\[0\].function.name: must be a string",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        r"tool_calls\[0\].function.arguments: is not valid JSON",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
        r"tool_calls\[0\].function.arguments: must be an object",
    ),
]


@pytest.mark.parametrize(("messages", "reason"), BAD_MESSAGES)
def test_a_wrong_message_is_refused_by_the_name_of_its_field(messages: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        parse_messages(messages)


def test_arguments_of_tool_calls_become_objects_and_unknown_fields_go() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    (message,) = parse_messages([{"role": "assistant", "tool_calls": [call], "audio": {"id": "x"}}])
    expected = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
    assert message == Message(role="assistant", content=None, fields={"tool_calls": [expected]})
    assert call["function"] == {"name": "f", "arguments": '{"a": [1]}'}  # the caller's own


def test_a_tool_call_without_arguments_has_none() -> None:
    for arguments in ("", None, "{}"):
        call = {"function": {"name": "f", "arguments": arguments}}
        (message,) = parse_messages([{"role": "assistant", "tool_calls": [call]}])
        assert message.fields["tool_calls"][0]["function"]["arguments"] == {}


def test_media_is_found_by_modality_in_the_order_of_the_conversation() -> None:
    messages = parse_messages(
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "image", "image": 1}, "a"]},
            {"role": "assistant", "content": "b"},
            {
                "role": "user",
                "content": [
                    {"type": "audio", "audio": 2},
                    {"type": "image", "image": 3, "uuid": "u"},
                ],
            },
        ]
    )
    media = get_media(messages)
    assert {m: [(part.media, part.uuid) for part in parts] for m, parts in media.items()} == {
        "image": [(1, None), (3, "u")],
        "audio": [(2, None)],
    }
