"""Requests of all kinds, and what of their answers must not depend on who answers."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from sensorium.embedded.samples import MEDIA_FOLDER
from tests.support.server import ServerProcess

MODEL = "sensorium-mini"
_TIMEOUT_S = 240.0
_VOLATILE = frozenset(
    {
        *("id", "created", "request_id", "item_id", "event_id", "sensorium_trace"),
        "cached_tokens",  # depends on which of the requests at a time came first
    }
)
_QUESTIONS = ("What do you see?", "What color is it?", "How many are there?", "Read it.")
_WORDS = ("one", "two", "red", "blue", "circle", "and", "the", "number", "say", "hello")


@dataclass(frozen=True, eq=False)
class Near:
    """A log-probability or a time. Neighbours in a batch may change its last digits."""

    value: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Near) and isclose(
            self.value, other.value, rel_tol=1e-3, abs_tol=2e-3
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request to a server, and how its answer is read."""

    kind: str
    path: str
    body: dict[str, Any]
    is_got: bool = False  # it has no body
    is_streamed: bool = False
    is_aborted: bool = False
    upload: str = ""  # a sample that is sent as a file
    after: str = ""  # the kind of request to this server from which `body` is completed
    headers: dict[str, str] = field(default_factory=dict)


def ask(server: ServerProcess, request: Request) -> Any:
    """Send a request, and return what must be equal on all servers."""
    if request.is_aborted:
        return _abort(server, request)
    if request.is_got:
        return _read(server.get(request.path), is_streamed=False)
    body = dict(request.body)
    if request.after:
        body |= _render(server, body.pop("chat"))
    if request.upload:
        answer = _upload(server, request.path, request.upload, body)
        return _read(answer, is_streamed=request.is_streamed)
    answer = httpx.post(
        server.get_url(request.path), json=body, headers=request.headers, timeout=_TIMEOUT_S
    )
    return _read(answer, is_streamed=request.is_streamed)


def _upload(server: ServerProcess, path: str, name: str, fields: dict[str, Any]) -> httpx.Response:
    files = {"file": (name, (MEDIA_FOLDER / name).read_bytes())}
    return httpx.post(server.get_url(path), data=fields, files=files, timeout=_TIMEOUT_S)


def _render(server: ServerProcess, chat: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(
        server.get_url("/v1/chat/completions/render"), json=chat, timeout=_TIMEOUT_S
    )
    answer.raise_for_status()
    return dict(answer.json())


def _abort(server: ServerProcess, request: Request) -> str:
    """Leave after the first piece of a stream. Return nothing that could differ."""
    with (
        httpx.Client(timeout=_TIMEOUT_S) as client,
        client.stream("POST", server.get_url(request.path), json=request.body) as answer,
    ):
        for line in answer.iter_lines():
            if line:
                return "left"
    return "nothing came"


def _read(answer: httpx.Response, *, is_streamed: bool) -> Any:
    kind = answer.headers.get("content-type", "")
    if is_streamed and kind.startswith("text/event-stream"):
        return answer.status_code, _join(answer.text)
    if "json" in kind:
        return answer.status_code, _strip(answer.json())
    return answer.status_code, answer.text


def _join(text: str) -> Any:
    """Return a stream's texts, ends and usage. How it was cut into pieces may differ."""
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    ends: dict[int, Any] = {}
    usage = error = None
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    for line in lines:
        if line == "[DONE]":
            continue
        chunk = json.loads(line)
        usage, error = chunk.get("usage") or usage, chunk.get("error") or error
        if chunk.get("type") == "transcript.text.delta":
            texts[0] = texts.get(0, "") + chunk["delta"]
        for choice in chunk.get("choices", ()):
            index = choice["index"]
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            texts[index] = texts.get(index, "") + piece
            tokens.setdefault(index, []).extend(choice.get("token_ids") or ())
            ends[index] = choice.get("finish_reason") or ends.get(index)
    return texts, tokens, ends, _strip(usage), error, lines[-1:] == ["[DONE]"]


def _strip(value: Any) -> Any:
    """Remove what differs between two answers of one server, and compare numbers roughly."""
    if isinstance(value, dict):
        return {k: _strip(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list):
        return [_strip(entry) for entry in value]
    return Near(value) if isinstance(value, float) else value


# ---- requests


def make_requests(count: int, *, seed: int) -> list[Request]:
    """Return mixed requests, the same for the same seed. All kinds occur, in a random order."""
    rng = random.Random(seed)
    makers = _list_makers(rng)
    picks = [*makers, *(rng.choice(makers) for _ in range(max(0, count - len(makers))))]
    rng.shuffle(picks)
    return [make() for make in picks[:count]]


def _list_makers(rng: random.Random) -> list[Callable[[], Request]]:
    return [maker for maker in _iterate_makers(rng)]


def _iterate_makers(rng: random.Random) -> Iterator[Callable[[], Request]]:
    def chat(kind: str, content: Any, **fields: Any) -> Request:
        body = make_chat(content, **{"max_tokens": 12, "temperature": 0, **fields})
        is_streamed = bool(fields.get("stream"))
        return Request(kind=kind, path="/v1/chat/completions", body=body, is_streamed=is_streamed)

    def ask_about(*parts: dict[str, Any]) -> list[dict[str, Any]]:
        return [*parts, {"type": "text", "text": rng.choice(_QUESTIONS)}]

    def say() -> str:
        return " ".join(rng.choices(_WORDS, k=rng.randrange(3, 30)))

    stream = {"stream": True, "stream_options": {"include_usage": True}}
    yield lambda: chat("text", say())
    yield lambda: chat("text streamed", say(), **stream)
    yield lambda: chat("image", ask_about(make_picture(rng.randrange(12))))
    yield lambda: chat("image streamed", ask_about(make_picture(rng.randrange(12))), **stream)
    yield lambda: chat("images", ask_about(*map(make_picture, rng.sample(range(12), 3))))
    yield lambda: chat("sample", ask_about(make_part("shapes.png"), make_part("count.png")))
    yield lambda: chat("gif", ask_about(make_picture(rng.randrange(4), "GIF")))
    yield lambda: chat("sound", ask_about(make_part("question.flac")))
    yield lambda: chat("video", ask_about(make_part("moving.mp4")), **stream)
    yield lambda: chat("sampled", say(), temperature=1.5, seed=rng.randrange(100), n=2)
    yield lambda: chat("scored", say(), logprobs=True, top_logprobs=2)
    yield lambda: chat("stopped", say(), stop=["e"], **stream)
    yield lambda: chat("closed", say(), structured_outputs={"choice": ["yes", "no"]})
    yield lambda: chat("schema", ask_about(make_part("digits.png")), response_format=_SCHEMA)
    yield lambda: chat("damaged", ask_about(_DAMAGED))
    yield lambda: chat("unknown uuid", ask_about(_UNKNOWN))
    yield lambda: chat("bad field", say(), temperature=-1)
    yield lambda: chat("too long", " ".join(rng.choices(_WORDS, k=100_000)))
    yield lambda: Request(
        kind="completions",
        path="/v1/completions",
        body={"prompt": [say(), say()], "max_tokens": 6, "temperature": 0, "logprobs": 1},
    )
    yield lambda: Request(
        kind="echo",
        path="/v1/completions",
        body={"prompt": say(), "max_tokens": 4, "temperature": 0, "echo": True, **stream},
        is_streamed=True,
    )
    yield lambda: Request(
        kind="tokenize", path="/tokenize", body=make_chat(ask_about(make_picture(3)))
    )
    yield lambda: Request(
        kind="detokenize", path="/detokenize", body={"tokens": rng.choices(range(200), k=9)}
    )
    yield lambda: Request(
        kind="render",
        path="/v1/chat/completions/render",
        body={**make_chat(ask_about(make_picture(5))), "return_kwargs": False},
    )
    for streams in ({}, stream):
        yield lambda streams=streams: Request(  # type: ignore[misc]
            kind="generate",
            path="/inference/v1/generate",
            body={"chat": make_chat(ask_about(make_picture(7)), max_tokens=8), **streams},
            after="render",
            is_streamed=bool(streams),
        )
    for form in ("json", "verbose_json", "srt", "text"):
        yield lambda form=form: Request(  # type: ignore[misc]
            kind=f"speech {form}",
            path="/v1/audio/transcriptions",
            body={"model": MODEL, "response_format": form},
            upload="speech.flac",
        )
    yield lambda: Request(
        kind="speech streamed",
        path="/v1/audio/transcriptions",
        body={"model": MODEL, "stream": "true"},
        upload="speech.flac",
        is_streamed=True,
    )
    yield lambda: Request(
        kind="translation",
        path="/v1/audio/translations",
        body={"model": MODEL},
        upload="speech.flac",
    )
    yield lambda: Request(
        kind="render texts", path="/v1/completions/render", body={"prompt": [say(), say()]}
    )
    for path, name, fields in _DERENDERS:
        yield lambda path=path, name=name, fields=fields: Request(  # type: ignore[misc]
            kind=f"derender {name}", path=path, body={name: _GENERATED[name], **fields}
        )
    for path in _PAGES:
        yield lambda path=path: Request(  # type: ignore[misc]
            kind=path, path=path, body={}, is_got=True
        )
    yield lambda: chat("tools", say(), tools=[_TOOL], tool_choice="required", max_tokens=40)
    yield lambda: Request(
        kind="abort",
        path="/v1/chat/completions",
        body=make_chat(ask_about(make_picture(rng.randrange(12))), **stream, **_ENDLESS),
        is_aborted=True,
    )


_PAGES = ("/v1/models", f"/v1/models/{MODEL}", "/health", "/ping", "/version", "/openapi.json")
_TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["number"],
            "additionalProperties": False,
        },
    },
}
_RESPONSE = {
    "request_id": "one",
    "choices": [{"index": 0, "token_ids": [40, 41, 42], "finish_reason": "length"}],
}
_GENERATED: dict[str, Any] = {"generate_response": _RESPONSE, "generate_responses": [_RESPONSE]}
_DERENDERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "/v1/chat/completions/derender",
        "generate_response",
        {"chat_request": {"model": MODEL}, "prompt_tokens": 5},
    ),
    (
        "/v1/completions/derender",
        "generate_responses",
        {"completion_request": {"model": MODEL}, "prompt_tokens": [5]},
    ),
)
_ENDLESS = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "reading",
        "schema": {
            "type": "object",
            "properties": {"sure": {"type": "boolean"}},
            "required": ["sure"],
            "additionalProperties": False,
        },
    },
}
_DAMAGED = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"no picture").decode()},
}
_UNKNOWN = {"type": "image_url", "image_url": None, "uuid": "never sent"}


def make_chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def make_part(name: str, **fields: Any) -> dict[str, Any]:
    """Return a part of a message with a sample of the package."""
    data = (MEDIA_FOLDER / name).read_bytes()
    suffix = Path(name).suffix.removeprefix(".")
    modality = {"png": "image", "mp4": "video", "flac": "audio"}[suffix]
    url = f"data:{modality}/{suffix};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}, **fields}


def make_picture(seed: int, form: str = "PNG", **fields: Any) -> dict[str, Any]:
    """Return a part of a message with a picture that only this seed has."""
    return make_image(make_file(seed, form), form, **fields)


def make_file(seed: int, form: str = "PNG", *, size: int = 48) -> bytes:
    picture = Image.new("RGB", (size, size), (seed * 20 % 256, seed * 70 % 256, 90))
    picture.paste((250, seed * 9 % 256, seed), (4, 4, 4 + seed % 30, 20))
    file = io.BytesIO()
    picture.save(file, form)
    return file.getvalue()


def make_image(data: bytes, form: str = "PNG", **fields: Any) -> dict[str, Any]:
    url = f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}, **fields}
