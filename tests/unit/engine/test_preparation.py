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
from sensorium.utils.pausing import Pausing

PLAIN = SamplingParams()
GRAMMAR = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
TOOLS = Chat(messages=[], options=ChatOptions(tools=[{"type": "function"}]), fields={})


class SlowRenderer:
    """Nothing but the prompt "plain" is ever ready before `is_over`."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def render_pausing(
        self, prompt: Prompt | Chat, params: SamplingParams, **_: Any
    ) -> Pausing[Prepared]:
        del params
        if prompt != "plain":
            self.is_over.wait()
        yield from ()
        return Prepared(processed=None, stages={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "params"), [("slow", GRAMMAR), (TOOLS, PLAIN)], ids=["grammar", "tools"]
)
def test_grammars_hold_up_no_text_without_one(prompt: Prompt | Chat, params: Any) -> None:
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
