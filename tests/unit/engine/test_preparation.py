"""What takes long to prepare holds up only what is of its kind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from sensorium.engine.chat import Chat
from sensorium.engine.preparation import Preparation
from sensorium.engine.renderer import Prepared
from sensorium.render.chat_options import ChatOptions
from sensorium.types.prompts import Prompt
from sensorium.types.sampling import SamplingParams
from sensorium.types.structured import StructuredOutputsParams

PLAIN = SamplingParams()
GRAMMAR = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
LONG_TEXT = "a" * 10_000
LONG_CHAT = Chat(
    messages=[{"role": "user", "content": [{"type": "text", "text": LONG_TEXT}]}],
    options=ChatOptions(),
    fields={},
)
MANY_MESSAGES = Chat(
    messages=[{"role": "user", "content": "a"}] * 1000, options=ChatOptions(), fields={}
)
TOOLS = Chat(messages=[], options=ChatOptions(tools=[{"type": "function"}]), fields={})


class SlowRenderer:
    """Nothing but the prompt "plain" is ever ready before `is_over`."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def render_chat(self, chat: Chat, params: SamplingParams, **_: Any) -> Prepared:
        del chat, params
        self.is_over.wait()
        return Prepared(processed=None, stages={})  # type: ignore[arg-type]

    def render_completion(self, prompt: Prompt, params: SamplingParams, **_: Any) -> Prepared:
        del params
        if prompt != "plain":
            self.is_over.wait()
        return Prepared(processed=None, stages={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("slow", GRAMMAR),
        (TOOLS, PLAIN),
        (LONG_TEXT, PLAIN),
        ({"prompt": LONG_TEXT}, PLAIN),
        (LONG_CHAT, PLAIN),
        (MANY_MESSAGES, PLAIN),
    ],
    ids=["grammar", "tools", "long text", "long prompt", "long chat", "many messages"],
)
def test_what_takes_long_holds_up_no_short_text(prompt: Prompt | Chat, params: Any) -> None:
    async def run() -> None:
        renderer = SlowRenderer()
        preparation = Preparation(
            renderer,  # type: ignore[arg-type]
            draw_seed=lambda: 0,
            release=lambda _: None,
        )
        slow = [asyncio.ensure_future(preparation.prepare("", prompt, params)) for _ in range(40)]
        try:
            await asyncio.sleep(0)
            await asyncio.wait_for(preparation.prepare("", "plain", PLAIN), 30)
            assert not any(task.done() for task in slow)
        finally:
            renderer.is_over.set()
            await asyncio.gather(*slow)
            preparation.close()

    asyncio.run(run())
