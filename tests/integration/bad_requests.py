"""Requests that a server has to refuse, each with the status and the field that it must name."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.media import make_pixels, write_image

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON_HEADERS = {"content-type": "application/json"}
HUGE = 10**30


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRequest:
    """A request that must be refused, and the error that must come back."""

    name: str
    path: str = CHAT
    content: bytes
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON_HEADERS))
    status: int = 400
    param: str | None = None  # the field that the error must name
    words: str = ""  # a text that the message must contain


def make_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def make_image_url(seed: int = 0) -> str:
    return make_url(write_image(make_pixels(seed=seed), "PNG"))


def make_messages(*urls: str, kind: str = "image_url") -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": kind, kind: {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}]


GOOD_MESSAGES = [{"role": "user", "content": "hello"}]
_GOOD_CHAT = {"messages": GOOD_MESSAGES, "max_tokens": 4}
_GOOD_PROMPT = {"prompt": "hello", "max_tokens": 4}


def list_bad_requests() -> list[BadRequest]:
    return [
        *_list_bodies(),
        *_list_numbers(),
        *_list_fields(),
        *_list_prompts(),
        *_list_messages(),
        *_list_media(),
    ]


def _list_bodies() -> Iterator[BadRequest]:
    """Yield bodies that can't be decoded at all, for which the message must name the place."""
    bodies = [
        ("an empty body", b"", "empty"),
        ("white space", b" \n ", "empty"),
        ("half an object", b'{"messages": [', "JSON"),
        ("a comma too many", b'{"messages": [],}', "JSON"),
        ("two objects", b"{}{}", "JSON"),
        ("single quotes", b"{'messages': []}", "JSON"),
        ("a list", b"[]", "a list"),
        ("a string", b'"messages"', "a string"),
        ("a number", b"1", "a number"),
        ("null", b"null", "null"),
        ("NaN", b'{"temperature": NaN}', "JSON"),
        ("Infinity", b'{"temperature": -Infinity}', "JSON"),
        ("bytes that are no UTF-8", b'{"model": "\xff\xfe"}', "UTF-8"),
        ("a lone surrogate as an escape", b'{"model": "\\ud800"}', "JSON"),
        ("a lone surrogate as bytes", b'{"model": "\xed\xa0\x80"}', "UTF-8"),
        ("deep lists", b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested"),
        ("deep objects", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested"),
        ("a binary body", bytes(range(256)) * 8, "JSON"),
    ]
    for path in (CHAT, COMPLETIONS):
        for name, content, words in bodies:
            yield BadRequest(name=f"{name} to {path}", path=path, content=content, words=words)
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-msgpack"):
        yield BadRequest(
            name=f"a body of {kind}",
            content=_encode(_GOOD_CHAT),
            headers={"content-type": kind},
            words="content type",
        )


def _list_numbers() -> Iterator[BadRequest]:
    """Yield numbers that are not allowed; the error must name the field of each."""
    ranges: dict[str, list[str]] = {
        "max_tokens": ["0", "-1", "1.5", "1e400", str(HUGE), "true", '"5"', "[]"],
        "max_completion_tokens": ["0", "-1", "1e400", str(HUGE)],
        "min_tokens": ["-1", "1e400", str(HUGE), "5"],
        "n": ["0", "-1", "129", "1e400", str(HUGE), "null0"],
        "temperature": ["-1", "1e400", str(HUGE), "101", '"hot"', "true"],
        "top_p": ["0", "-0.5", "1.1", "1e400"],
        "top_k": ["-2", "1e400", str(HUGE), "0.5"],
        "min_p": ["-0.1", "2"],
        "repetition_penalty": ["0", "-1", "1e400", "1e-320"],
        "presence_penalty": ["3", "-1e400"],
        "frequency_penalty": ["3", "-3"],
        "seed": ["1e400", str(HUGE), str(-HUGE), "0.5", '"1"'],
        "priority": ["1e400", str(HUGE), "0.5"],
        "top_logprobs": ["-1", "21", "1e400"],
        "prompt_logprobs": ["-1", "21", str(HUGE)],
    }
    for name, values in ranges.items():
        for value in values:
            content = _encode(_GOOD_CHAT)[:-1] + f',"{name}":{value}}}'.encode()
            # The parser itself refuses numbers that no double can hold, and names the position.
            is_unreadable = value in ("1e400", "-1e400", "null0")
            yield BadRequest(
                name=f"{name} {value}",
                content=content,
                param=None if is_unreadable else name,
                words="JSON" if is_unreadable else name,
            )


def _list_fields() -> Iterator[BadRequest]:
    fields: list[tuple[str, Any, str]] = [
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("stop", 5, "stop"),
        ("stop", ["a", None], "stop[1]"),
        ("stop", [""], "stop"),
        ("stop", ["a"] * 100_000, "stop"),
        ("stop", ["a" * 100_000], "stop[0]"),
        ("stop_token_ids", [-1], "stop_token_ids[0]"),
        ("stop_token_ids", [HUGE], "stop_token_ids[0]"),
        ("stop_token_ids", [1] * 100_000, "stop_token_ids"),
        ("allowed_token_ids", [], "allowed_token_ids"),
        ("allowed_token_ids", [2**31 - 1], "allowed_token_ids"),
        ("bad_words", [""], "bad_words"),
        ("logit_bias", [1], "logit_bias"),
        ("logit_bias", {"dog": 1}, "logit_bias.dog"),
        ("logit_bias", {"5": 101}, "logit_bias"),
        ("logit_bias", {"999999999": 1}, "logit_bias"),
        ("logit_bias", {str(key): 1 for key in range(100_000)}, "logit_bias"),
        ("logprobs", 5, "logprobs"),
        ("top_logprobs", 5, "top_logprobs"),
        ("model", 5, "model"),
        ("response_format", {"type": "xml"}, "response_format.type"),
        ("response_format", "text", "response_format"),
        ("tools", {"type": "function"}, "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", "all", "tool_choice"),
        ("modalities", ["audio"], "modalities"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("guided_json", {"type": "bogus"}, "guided_json"),
        ("guided_json", "{", "guided_json"),
        ("guided_regex", "(a", "guided_regex"),
        ("guided_choice", [], "guided_choice"),
        ("guided_grammar", "start: nobody", "guided_grammar"),
        ("structured_outputs", {"regex": "[^\\s\\S]"}, "structured_outputs.regex"),
        ("structured_outputs", {"xml": True}, "structured_outputs"),
        ("cache_salt", "", "cache_salt"),
        ("cache_salt", 5, "cache_salt"),
        ("chat_template", "{{ messages }}", "chat_template"),
        ("chat_template_kwargs", [], "chat_template_kwargs"),
        ("mm_processor_kwargs", "fast", "mm_processor_kwargs"),
        ("media_io_kwargs", {"image": 5}, "media_io_kwargs.image"),
    ]
    for index, (name, value, param) in enumerate(fields):
        yield _make(f"field {index}: {param}", _GOOD_CHAT | {name: value}, param=param)
    unknown = _GOOD_CHAT | {"model": "another-model"}
    yield _make("another model", unknown, status=404, param="model", words="another-model")


def _list_prompts() -> Iterator[BadRequest]:
    prompts: list[tuple[str, Any, str]] = [
        ("null", None, "prompt"),
        ("an empty list", [], "prompt"),
        ("a number", 5, "prompt"),
        ("an object", {"text": "hello"}, "prompt"),
        ("mixed kinds", ["hello", [1]], "prompt[1]"),
        ("an empty list of ids", [[1], []], "prompt[1]"),
        ("a negative id", [1, -1], "prompt[1]"),
        ("a huge id", [1, HUGE], "prompt[1]"),
        ("half an id", [1, 0.5], "prompt[1]"),
        ("an id that the model lacks", [1, 2**31 - 1], "prompt"),
        ("more text than the context holds", "fox " * 5_000, "prompt"),
        ("more ids than the context holds", [1] * 200_000, "prompt"),
        ("more prompts than one call may have", ["a"] * 1_025, "prompt"),
    ]
    for name, prompt, param in prompts:
        yield _make(f"prompt: {name}", _GOOD_PROMPT | {"prompt": prompt}, COMPLETIONS, param=param)
    yield _make("no prompt", {"max_tokens": 4}, COMPLETIONS, param="prompt")
    for name, value in (("echo", "yes"), ("best_of", 3), ("suffix", "end"), ("logprobs", 21)):
        yield _make(f"completion's {name}", _GOOD_PROMPT | {name: value}, COMPLETIONS, param=name)


def _list_messages() -> Iterator[BadRequest]:
    """Yield bad conversations; `param` must be the whole path of the field that is wrong."""

    def make_user(**fields: Any) -> list[Any]:
        return [{"role": "user", "content": "hello", **fields}]

    part = {"type": "text", "text": "see"}
    conversations: list[tuple[str, Any, str]] = [
        ("null", None, "messages"),
        ("a string", "hello", "messages"),
        ("none at all", [], "messages"),
        ("a number among them", [*make_user(), 5], "messages[1]"),
        ("no role", [{"content": "hello"}], "messages[0].role"),
        ("an unknown role", make_user(role="robot"), "messages[0].role"),
        ("a role of a wrong type", make_user(role=["user"]), "messages[0].role"),
        ("no content", [{"role": "user"}], "messages[0].content"),
        ("content of a wrong type", make_user(content=5), "messages[0].content"),
        ("a name of a wrong type", make_user(name=5), "messages[0].name"),
        ("a part of a wrong type", make_user(content=[part, 5]), "messages[0].content[1]"),
        ("a part without a type", make_user(content=[{}]), "messages[0].content[0].type"),
        (
            "an unknown part",
            make_user(content=[part, {"type": "smell"}]),
            "messages[0].content[1].type",
        ),
        (
            "text of a wrong type",
            make_user(content=[{"type": "text", "text": 5}]),
            "messages[0].content[0].text",
        ),
        (
            "an image without its object",
            make_user(content=[part, {"type": "image_url"}]),
            "messages[0].content[1]",
        ),
        (
            "an address of a wrong type",
            make_user(content=[{"type": "image_url", "image_url": {"url": 5}}]),
            "messages[0].content[0].image_url.url",
        ),
        (
            "tool calls that are none",
            [{"role": "assistant", "tool_calls": "f()"}],
            "messages[0].tool_calls",
        ),
        ("more than the context holds", make_user(content="fox " * 5_000), "messages"),
    ]
    for name, messages, param in conversations:
        yield _make(f"messages: {name}", _GOOD_CHAT | {"messages": messages}, param=param)
    yield _make("no messages", {"max_tokens": 4}, param="messages")


def _list_media() -> Iterator[BadRequest]:
    """Yield bad media, for a server that takes two images and reads no files of this machine."""
    png = write_image(make_pixels(), "PNG")
    second = "messages[0].content[2]"
    broken: list[tuple[str, str, int, str]] = [
        ("half a picture", make_url(png[: len(png) // 2]), 400, "image"),
        ("a damaged picture", make_url(png[:40] + b"\0" * 40 + png[80:]), 400, "image"),
        ("text as a picture", make_url(b"this is no picture"), 400, "image"),
        ("no base64", "data:image/png;base64,!!!!", 400, "base64"),
        ("base64 that is cut off", "data:image/png;base64,iVBORw0KGg", 400, "image"),
        ("a data URL without a comma", "data:image/png;base64", 400, "comma"),
        ("an empty address", "", 400, "data:"),
        ("an unknown scheme", "ftp://example.com/a.png", 400, "data:"),
        ("no scheme", "picture.png", 400, "data:"),
        ("an address that is none", "http://[::1/a.png", 400, "URL"),
        ("a picture of nothing", make_url(b""), 422, "empty"),
        ("a file", "file:///etc/hostname", 422, "local files"),
        ("a file by another name", "file:/etc/../etc/passwd", 422, "local files"),
        ("a forbidden address", "http://127.0.0.1:1/a.png", 422, "127.0.0.1"),
        ("a forbidden network", "http://169.254.169.254/latest", 422, "169.254.169.254"),
    ]
    for name, url, status, words in broken:
        body = _GOOD_CHAT | {"messages": make_messages(make_image_url(), url)}
        yield _make(name, body, status=status, param=second, words=words)
    for name, part, status, words in (
        ("a path", {"image": "/etc/hostname"}, 400, "media URLs start with data:"),
        ("a path from here", {"image": "README.md"}, 400, "media URLs start with data:"),
        ("a path by its name", {"path": "/etc/hostname"}, 422, "local files"),
    ):
        messages = [{"role": "user", "content": [{"type": "image", **part}]}]
        body = _GOOD_CHAT | {"messages": messages}
        yield _make(name, body, status=status, param="messages[0].content[0]", words=words)
    three = make_messages(*(make_image_url(seed) for seed in range(3)))
    yield _make("three pictures", _GOOD_CHAT | {"messages": three}, param="messages", words="image")
    for kind, what in (("video_url", "video/mp4"), ("audio_url", "audio/wav")):
        messages = make_messages(make_url(b"neither sound nor sight", what), kind=kind)
        yield _make(
            f"a broken {kind}", _GOOD_CHAT | {"messages": messages}, param="messages[0].content[1]"
        )
    wrong = {"type": "input_audio", "input_audio": {"data": "!!!!", "format": "wav"}}
    yield _make(
        "sound that is no base64",
        _GOOD_CHAT | {"messages": [{"role": "user", "content": [wrong]}]},
        param="messages[0].content[0].input_audio.data",
    )


def _make(name: str, body: Any, path: str = CHAT, **expected: Any) -> BadRequest:
    return BadRequest(name=name, path=path, content=_encode(body), **expected)


def _encode(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
