"""Requests with token ids and processed media, as another frontend would send them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec

from sensorium import LLM, SamplingParams
from sensorium.engine.inputs.renderer import Chat
from sensorium.multimodal.item_codec import encode_item
from sensorium.render.messages import ChatOptions
from sensorium.types.multimodal import as_runs
from tests.support.clients import Message
from tests.support.server import ServerProcess

Body = dict[str, Any]
PATH = "/inference/v1/generate"
MSGPACK = {"content-type": "application/x-msgpack"}
GREEDY = {"temperature": 0.0, "max_tokens": 10}


def render(
    llm: LLM,
    messages: list[Message],
    *,
    rename: Callable[[str], str] = str,
    has_layouts: bool = True,
    **fields: Any,
) -> Body:
    """Return a rendered request as a body for msgpack, with its items as bytes.

    `rename` makes new hashes of the true ones. `fields` are fields of the prompt.
    """
    chat = Chat(messages=messages, options=ChatOptions(), fields=fields)  # type: ignore[arg-type]
    processed = llm.renderer.render(chat, SamplingParams(), skip_mm_cache=True).processed
    features: dict[str, dict[str, list[Any]]] = {
        "mm_hashes": {},
        "mm_placeholders": {},
        "kwargs_data": {},
    }
    handles = {item.handle.mm_hash: item.handle for item in processed.items}
    for feature in processed.request.mm_features:
        position, handle = feature.mm_position, handles[feature.mm_hash]
        layout = handle.layout if has_layouts else None
        runs = as_runs(position.is_embed)
        row = {
            "mm_hashes": rename(feature.mm_hash),
            "mm_placeholders": {
                "offset": position.offset,
                "length": position.length,
                "is_embed": None if runs is None else list(runs),
            },
            "kwargs_data": encode_item(handle.kwargs or {}, layout),
        }
        for name, value in row.items():
            features[name].setdefault(feature.modality, []).append(value)
    llm.input_processor.release(processed)
    return {
        "token_ids": list(processed.request.prompt_token_ids),
        "features": features if processed.request.mm_features else None,
        "sampling_params": dict(GREEDY),
    }


def without_items(body: Body) -> Body:
    """Return the body without its items, as a client sends it if the server has them."""
    return {**body, "features": {**body["features"], "kwargs_data": None}}


def as_json(value: Any) -> Any:
    """Return the value with bytes as base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: as_json(entry) for name, entry in value.items()}
    return [as_json(entry) for entry in value] if isinstance(value, list) else value


def post(
    server: ServerProcess, body: Any, *, is_msgpack: bool = True, **headers: str
) -> httpx.Response:
    content = msgspec.msgpack.encode(body) if is_msgpack else json.dumps(as_json(body)).encode()
    own = MSGPACK if is_msgpack else {"content-type": "application/json"}
    return httpx.post(
        server.get_url(PATH), content=content, headers={**own, **headers}, timeout=120.0
    )


def generate(server: ServerProcess, body: Body, **options: Any) -> tuple[int, ...]:
    """Return the tokens of the first choice."""
    return get_token_ids(post(server, body, **options))


def get_token_ids(response: httpx.Response) -> tuple[int, ...]:
    assert response.status_code == 200, response.text
    return tuple(response.json()["choices"][0]["token_ids"])


def read_events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream, without the `[DONE]` at its end."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def join_events(events: Sequence[Any], index: int = 0) -> tuple[int, ...]:
    choices = [choice for event in events for choice in event["choices"]]
    return tuple(t for choice in choices if choice["index"] == index for t in choice["token_ids"])
