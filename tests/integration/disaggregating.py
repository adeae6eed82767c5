"""Renders on one server, generates on another, and derenders on the first one again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from tests.support.server import ServerProcess

MSGPACK = "application/x-msgpack"
_RENDER = "/v1/chat/completions/render"
_GENERATE = "/inference/v1/generate"
_DERENDER = "/v1/chat/completions/derender"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way in which a request is sent and answered."""

    is_msgpack: bool = False
    is_streamed: bool = False
    has_kwargs: bool = True  # the processed pixels are sent with it


def render(server: ServerProcess, body: dict[str, Any], route: Route) -> dict[str, Any]:
    accept = MSGPACK if route.is_msgpack else "application/json"
    fields = body if route.has_kwargs else {**body, "return_kwargs": False}
    answer = server.post(_RENDER, fields, headers={"accept": accept})
    answer.raise_for_status()
    assert answer.headers["content-type"].startswith(accept)
    decoded = msgspec.msgpack.decode(answer.content) if route.is_msgpack else answer.json()
    return dict(decoded)


def post_generate(
    server: ServerProcess, rendered: dict[str, Any], route: Route, **fields: Any
) -> httpx.Response:
    """Send a request as `render` returned it, in the same encoding."""
    body = {**rendered, **fields}
    if not route.is_msgpack:
        return server.post(_GENERATE, body)
    return httpx.post(
        server.get_url(_GENERATE),
        content=msgspec.msgpack.encode(body),
        headers={"content-type": MSGPACK},
        timeout=120.0,
    )


def generate(server: ServerProcess, rendered: dict[str, Any], route: Route) -> Any:
    """Return the answer, or the list of its chunks if it is streamed."""
    if not route.is_streamed:
        answer = post_generate(server, rendered, route)
        answer.raise_for_status()
        return answer.json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = post_generate(server, rendered, route, **options)
    answer.raise_for_status()
    lines = [line for line in answer.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def derender(
    server: ServerProcess, generated: Any, body: dict[str, Any], *, num_prompt_tokens: int
) -> dict[str, Any]:
    """Return what a chat would have answered: its choices and its usage."""
    common = {"chat_request": body, "prompt_tokens": num_prompt_tokens}
    if not isinstance(generated, list):
        answer = server.post(_DERENDER, {"generate_response": generated, **common})
        answer.raise_for_status()
        return {
            "content": [choice["message"]["content"] for choice in answer.json()["choices"]],
            "finish_reason": [choice["finish_reason"] for choice in answer.json()["choices"]],
            "usage": _get_counts(answer.json()["usage"]),
        }
    return _derender_stream(server, generated, common)


def _derender_stream(
    server: ServerProcess, chunks: list[Any], common: dict[str, Any]
) -> dict[str, Any]:
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    usage = None
    state = None
    for chunk in chunks:
        fields = {"stream": True, "generate_chunk": chunk, "stream_state": state, **common}
        answer = server.post(_DERENDER, fields)
        answer.raise_for_status()
        state = answer.json()["stream_state"]
        made = answer.json()["chunk"]
        for choice in made["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
            ends[index] = choice["finish_reason"] or ends.get(index, "")
        usage = made.get("usage") or usage
    return {
        "content": [texts[index] for index in sorted(texts)],
        "finish_reason": [ends[index] for index in sorted(ends)],
        "usage": _get_counts(usage),
    }


def chat(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    """Return the choices and the usage of a chat that one server answers alone."""
    answer = server.post("/v1/chat/completions", body)
    answer.raise_for_status()
    return {
        "content": [choice["message"]["content"] for choice in answer.json()["choices"]],
        "finish_reason": [choice["finish_reason"] for choice in answer.json()["choices"]],
        "usage": _get_counts(answer.json()["usage"]),
    }


def _get_counts(usage: Any) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]
