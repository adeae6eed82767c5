"""A script that prints as JSON what a frontend's first requests still have to initialise.

It builds the frontend as its process does, with or without warm-up, and renders named conversations
from a file. It runs in a fresh interpreter, because a module is imported only once.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sensorium.engine.assembly.options import LoadingOptions, MediaOptions
from sensorium.server.options import ServeOptions
from sensorium.server.processes.control import StartFrontend

# The route that renders conversations; `None`: the engine is called without HTTP.
ROUTE: str | None = "/v1/chat/completions/render"
Counts = dict[str, Any]


def watch(counts: Counts) -> Callable[[], None]:
    """Begin to count, and return a function that adds the modules imported since."""
    import jinja2
    from transformers import AutoProcessor, AutoTokenizer

    from sensorium.multimodal.processing.processor import MultiModalProcessor
    from sensorium.render.chat_template import ChatTemplate

    counts |= {"processors": 0, "compilations": 0, "questions": 0}
    for owner in (AutoProcessor, AutoTokenizer):
        count_calls(owner, "from_pretrained", counts, "processors")
    count_calls(MultiModalProcessor, "__init__", counts, "processors")
    count_calls(jinja2.Environment, "compile", counts, "compilations")
    count_calls(ChatTemplate, "_ask", counts, "questions")
    before = set(sys.modules)

    def finish() -> None:
        counts["modules"] = sorted(set(sys.modules) - before)

    return finish


def count_calls(owner: Any, name: str, counts: Counts, key: str) -> None:
    original = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        counts[key] += 1
        return original(*arguments, **options)

    setattr(owner, name, counted)


async def render(engine: Any, app: Any, messages: Any) -> int:
    """Render a conversation, and return its number of tokens."""
    if ROUTE is not None:
        return len((await ask(app, ROUTE, {"messages": messages}))["token_ids"])
    from sensorium.engine.inputs.renderer import Chat
    from sensorium.render.messages import ChatOptions
    from sensorium.types.sampling import SamplingParams

    chat = Chat(messages=messages, options=ChatOptions(), fields={})
    async with engine.render(chat, SamplingParams(), request_id="first") as processed:
        return len(processed.request.prompt_token_ids)


async def ask(app: Any, path: str, body: Any) -> Any:
    """Send one request without an HTTP client, which would import modules of its own."""
    content = json.dumps(body).encode()
    left = asyncio.Event()
    received: list[dict[str, Any]] = [{"type": "http.request", "body": content}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if received:
            return received.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
    }
    await app(scope, receive, send)
    left.set()
    answer = b"".join(message.get("body", b"") for message in sent)
    if sent[0]["status"] != 200:
        raise AssertionError(answer)
    return json.loads(answer)


def main() -> None:
    model, warmup = sys.argv[1], sys.argv[2] == "warm"
    conversations = json.loads(Path(sys.argv[3]).read_text())
    options = ServeOptions(
        loading=LoadingOptions(model=model),
        warmup=warmup,
        media=MediaOptions(mm_processor_pool_size=1),
    )
    start = StartFrontend(
        options=options, index=0, identity="f0-1", listen_fd=-1, counts_fd=-1, socket_dir="/nowhere"
    )
    from sensorium.server.http.app import make_app
    from sensorium.server.metrics.frontend import FrontendMetrics
    from sensorium.server.processes.frontend_app import build_frontend_app

    frontend = build_frontend_app(start.options, identity=start.identity, shm_fd=start.shm_fd)
    app = make_app(frontend.engine, options, FrontendMetrics(model))
    counts: Counts = {"lengths": {}}
    finish = watch(counts)

    async def render_all() -> None:
        for name, messages in conversations.items():
            counts["lengths"][name] = await render(frontend.engine, app, messages)

    asyncio.run(render_all())
    finish()
    frontend.media_parts.close()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
