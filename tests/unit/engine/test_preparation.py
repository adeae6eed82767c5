"""What takes long to prepare holds up only what is of its kind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from sensorium.engine.inputs.preparation import Preparation
from sensorium.engine.inputs.renderer import Chat, Prepared
from sensorium.render.messages import ChatOptions
from sensorium.types.errors import StoppingError
from sensorium.types.request import Prompt
from sensorium.types.sampling import SamplingParams
from sensorium.types.structured import StructuredOutputsParams
from sensorium.utils.pausing import Pausing
from tests.support.waiting import wait_until_async

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
        self.has_begun = threading.Event()

    def render_pausing(
        self, prompt: Prompt | Chat, params: SamplingParams, **_: Any
    ) -> Pausing[Prepared]:
        del params
        self.has_begun.set()
        if prompt != "plain":
            self.is_over.wait()
        yield from ()
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
def test_slow_preparation_does_not_delay_short_text(prompt: Prompt | Chat, params: Any) -> None:
    async def run() -> None:
        renderer = SlowRenderer()
        preparation = make_preparation(renderer)
        slow = [asyncio.ensure_future(preparation.prepare("", prompt, params)) for _ in range(40)]
        try:
            await asyncio.sleep(0)
            await asyncio.wait_for(preparation.prepare("", "plain", PLAIN), 120)
            assert not any(task.done() for task in slow)
        finally:
            renderer.is_over.set()
            await asyncio.gather(*slow)
            preparation.close()

    asyncio.run(run())


class FetchingRenderer:
    """Waits for the media of each prompt but "here", and notes what becomes of the work."""

    def __init__(self) -> None:
        self.fetches: list[Future[None]] = []
        self.cancelled: list[Future[None]] = []
        self.ended: list[str] = []

    def render_pausing(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        cancelled: Future[None],
        **_: Any,
    ) -> Pausing[Prepared]:
        del params
        self.cancelled.append(cancelled)
        try:
            if "here" not in prompt["multi_modal_data"]:
                fetch: Future[None] = Future()
                self.fetches.append(fetch)
                yield fetch
        except GeneratorExit:
            self.ended.append("closed")
            raise
        self.ended.append("finished")
        return Prepared(processed=prompt, stages={"perceive": 1.0})


AWAY: Any = {"prompt": "", "multi_modal_data": {"away": 1}}
HERE: Any = {"prompt": "", "multi_modal_data": {"here": 1}}


def test_media_that_is_fetched_holds_no_thread() -> None:
    """However many requests wait for hosts, one with local media is prepared."""

    async def run() -> None:
        renderer = FetchingRenderer()
        preparation = make_preparation(renderer)
        away = [asyncio.ensure_future(preparation.prepare("", AWAY, PLAIN)) for _ in range(200)]
        await wait_until_async(lambda: len(renderer.fetches) == 200)
        await asyncio.wait_for(preparation.prepare("", HERE, PLAIN), 120)
        assert not any(task.done() for task in away)
        for fetch in renderer.fetches:
            fetch.set_result(None)
        prepared = await asyncio.gather(*away)
        assert all(set(each.stages) == {"perceive", "wait_thread"} for each in prepared)
        preparation.close()

    asyncio.run(run())


@pytest.mark.parametrize("way", ["leave", "close"])
def test_work_that_waits_for_a_host_is_closed_when_its_caller_is_gone(way: str) -> None:
    async def run() -> None:
        renderer = FetchingRenderer()
        preparation = make_preparation(renderer)
        task = asyncio.ensure_future(preparation.prepare("", AWAY, PLAIN))
        await wait_until_async(lambda: bool(preparation._waiting) and bool(renderer.fetches))
        await asyncio.sleep(0.05)
        if way == "leave":
            task.cancel()
        else:
            preparation.close()
        with pytest.raises(asyncio.CancelledError if way == "leave" else StoppingError):
            await task
        await wait_until_async(lambda: renderer.ended == ["closed"])
        assert renderer.cancelled[0].done()
        preparation.close()

    asyncio.run(run())


def test_a_request_that_was_finished_for_a_caller_that_left_is_released() -> None:
    async def run() -> None:
        renderer, released = SlowRenderer(), []
        preparation = make_preparation(renderer, released.append)
        task = asyncio.ensure_future(preparation.prepare("", "slow", PLAIN))
        await wait_until_async(lambda: renderer.has_begun.is_set())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        renderer.is_over.set()
        await wait_until_async(lambda: released == [None])
        preparation.close()

    asyncio.run(run())


def make_preparation(renderer: Any, release: Callable[[Any], None] = lambda _: None) -> Preparation:
    renderer.inputs = SimpleNamespace(draw_seed=lambda: 0, release=release)
    return Preparation(renderer)
