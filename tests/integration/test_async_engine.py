"""The engine of a server, over real sockets to a core, gives the same tokens as `LLM`.

Nothing is left behind, whatever happens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sensorium import LLM, SamplingParams
from sensorium.engine.assembly.frontend import MediaParts
from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.core_process.core_messages import ForgetMedia
from sensorium.multimodal.cache.mirror import MirrorSender
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    FailedRequestError,
    MissingMediaError,
    RequestError,
)
from tests.integration.async_serving import LocalCore, make_chat, make_png, run_core
from tests.support.waiting import wait_until_async
from tests.unit.multimodal.cache.item_building import get_kept_sizes

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=3500, ignore_eos=True)
IMAGES = [make_png(seed) for seed in range(4)]


@pytest.fixture(params=["lru", "shm"])
def core(request: Any, tmp_path: Path, tiny_model: Callable[[str], str]) -> Any:
    options = {"mm_processor_cache_type": request.param}
    with run_core(tiny_model("qwen2_5_vl"), tmp_path, **options) as core:
        yield core


@pytest.fixture
def lru_core(tmp_path: Path, tiny_model: Callable[[str], str]) -> Any:
    with run_core(tiny_model("qwen2_5_vl"), tmp_path) as core:
        yield core


Test = Callable[[AsyncEngine, MediaParts], Awaitable[None]]


def run(core: LocalCore, test: Test, *, identity: str = "f0-1") -> None:
    """Give `test` a frontend; afterwards nothing of its requests may be left."""

    async def main() -> None:
        engine, media_parts = core.make_frontend(identity)
        try:
            await engine.connect(core.info)
            await test(engine, media_parts)
            if engine.is_connected:  # answered after all that was sent before, in full
                await engine.reset_cache("prefix")
            await wait_until_async(lambda: not core.core.scheduler.has_requests)
            await wait_until_async(lambda: get_num_handles(media_parts) == 0)
            assert engine.get_statistics().num_preparing == 0
            assert engine.get_statistics().num_running == 0
        finally:
            await engine.close()
            media_parts.close()

    asyncio.run(asyncio.wait_for(main(), 120))
    core.assert_nothing_is_left()


def get_num_handles(media_parts: MediaParts) -> int:
    sender = media_parts.caches.sender
    if isinstance(sender, MirrorSender):
        return len(sender._held)
    store = media_parts.caches.store
    return 0 if store is None else store._num_leases.total()


async def start(engine: AsyncEngine, num: int = 4) -> list[asyncio.Task[Any]]:
    """Long requests that the core has taken, each with an image."""
    tasks = [
        asyncio.create_task(engine.generate(make_chat(image), LONG, request_id="long"))
        for image in IMAGES[:num]
    ]
    await wait_until_async(lambda: engine.get_statistics().num_running == num)
    return tasks


def test_answers_are_those_of_the_offline_engine(core: LocalCore) -> None:
    with LLM(core.loading.model, max_model_len=4096) as llm:
        messages: Any = [make_chat(image).messages for image in IMAGES]
        expected = [entry.outputs[0] for entry in llm.chat(messages, GREEDY, use_tqdm=False)]

    async def test(engine: AsyncEngine, _: MediaParts) -> None:
        for _round in range(2):
            outputs = await asyncio.gather(
                *(engine.generate(make_chat(i), GREEDY, request_id="r") for i in IMAGES * 2)
            )
            for output, other in zip(outputs, expected * 2, strict=True):
                assert output.request_id == "r"
                assert output.outputs[0].token_ids == other.token_ids
                assert output.outputs[0].text == other.text
                assert output.stages["transfer"] >= 0

    run(core, test)


def test_a_stream_of_several_completions_is_the_whole_answer_in_pieces(core: LocalCore) -> None:
    params = SamplingParams(seed=3, temperature=1.0, n=3, max_tokens=8, ignore_eos=True)

    async def test(engine: AsyncEngine, _: MediaParts) -> None:
        whole = await engine.generate(make_chat(IMAGES[0]), params, request_id="whole")
        texts = {0: "", 1: "", 2: ""}
        last = None
        async for delta in engine.stream(make_chat(IMAGES[0]), params, request_id="s"):
            assert delta.prompt_token_ids == whole.prompt_token_ids
            for entry in delta.deltas:
                texts[entry.index] += entry.text
            last = delta
        assert last is not None
        assert last.final is not None
        assert last.final.outputs == whole.outputs
        assert list(texts.values()) == [entry.text for entry in whole.outputs]
        assert last.final.mm_items[0].is_processor_hit

    run(core, test)


def test_a_caller_that_leaves_ends_its_request(core: LocalCore) -> None:
    async def test(engine: AsyncEngine, _: MediaParts) -> None:
        tasks = await start(engine)
        stream = engine.stream(make_chat(IMAGES[0]), LONG, request_id="s")
        await anext(stream)
        await stream.aclose()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    run(core, test)


def test_a_caller_may_leave_at_any_moment(core: LocalCore) -> None:
    """The first moments of a request are many turns of the loop: leave at each of them."""

    async def test(engine: AsyncEngine, _: MediaParts) -> None:
        params = SamplingParams(temperature=0, n=2, max_tokens=50, ignore_eos=True)
        for num_turns in range(0, 60, 3):
            image = make_png(100 + num_turns)
            task = asyncio.create_task(engine.generate(make_chat(image), params, request_id="r"))
            for _turn in range(num_turns):
                await asyncio.sleep(0 if num_turns % 2 else 0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(core, test)


def test_a_core_that_ends_fails_what_it_had_and_the_next_one_serves(core: LocalCore) -> None:
    async def test(engine: AsyncEngine, media_parts: MediaParts) -> None:
        before = await engine.generate(make_chat(IMAGES[0]), GREEDY, request_id="r")
        tasks = await start(engine)
        await asyncio.to_thread(core.stop)
        engine.disconnect("the engine has ended")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineLostError)
            assert str(result) == "the engine has ended"
        with pytest.raises(CapacityError, match="not running"):
            await engine.generate(make_chat(IMAGES[0]), GREEDY, request_id="r")
        await wait_until_async(lambda: get_num_handles(media_parts) == 0)
        await asyncio.to_thread(core.start)
        await engine.connect(core.info)
        after = await asyncio.gather(
            *(engine.generate(make_chat(IMAGES[0]), GREEDY, request_id="r") for _ in range(3))
        )
        assert all(entry.outputs == before.outputs for entry in after)

    run(core, test)


def test_a_new_frontend_takes_over_the_mirrored_cache_of_a_core(core: LocalCore) -> None:
    answers = []

    async def test(engine: AsyncEngine, _: MediaParts) -> None:
        output = await engine.generate(make_chat(IMAGES[1]), GREEDY, request_id="r")
        answers.append(output.outputs)

    run(core, test, identity="f0-1")
    run(core, test, identity="f0-2")
    assert answers[0] == answers[1]


def test_a_refusal_by_the_core_keeps_its_error_type(core: LocalCore) -> None:
    async def test(engine: AsyncEngine, _: MediaParts) -> None:
        with pytest.raises(RequestError, match="5000 tokens, but the context holds 4096") as caught:
            await engine.generate([5] * 5000, GREEDY, request_id="r")
        assert type(caught.value) is RequestError
        with pytest.raises(RequestError, match="half a character"):
            await engine.generate({"prompt": "x", "cache_salt": "\ud800"}, GREEDY, request_id="r")
        chat: Any = make_chat()
        chat.messages[0]["content"].append({"type": "image", "image": None, "uuid": "u"})
        with pytest.raises(MissingMediaError, match="in no cache"):
            await engine.generate(chat, GREEDY, request_id="r")
        await engine.generate(make_chat(IMAGES[0]), GREEDY, request_id="r")

    run(core, test)


def test_a_failing_step_fails_its_request_and_the_next_one_succeeds(core: LocalCore) -> None:
    async def test(engine: AsyncEngine, _: MediaParts) -> None:
        launch = core.core.runner.launch

        def fail(_: Any) -> Any:
            core.core.runner.launch = launch  # type: ignore[method-assign]
            raise RuntimeError("a kernel fell over")

        core.core.runner.launch = fail  # type: ignore[method-assign]
        with pytest.raises(FailedRequestError, match="a kernel fell over"):
            await engine.generate(make_chat(IMAGES[0]), GREEDY, request_id="r")
        await engine.generate(make_chat(IMAGES[0]), GREEDY, request_id="r")

    run(core, test)


def test_other_completions_of_one_that_failed_are_not_started(lru_core: LocalCore) -> None:
    core = lru_core

    async def test(engine: AsyncEngine, _: MediaParts) -> None:
        launch = core.core.runner.launch

        def fail_with_second(plan: Any) -> Any:
            if len(core.core.scheduler.requests) < 2:
                return launch(plan)
            core.core.runner.launch = launch  # type: ignore[method-assign]
            raise RuntimeError("a kernel fell over")

        core.core.runner.launch = fail_with_second  # type: ignore[method-assign]
        with pytest.raises(FailedRequestError, match="a kernel fell over"):
            await engine.generate([1, 2, 3], replace(LONG, n=4), request_id="r")
        await engine.reset_cache("prefix")  # answered after all that was sent before
        assert not core.core.has_requests

    run(core, test)


@pytest.mark.parametrize("name", ["launch", "finish"])
def test_a_core_whose_steps_all_fail_ends(lru_core: LocalCore, name: str) -> None:
    core = lru_core

    def fail(_: Any) -> Any:
        raise RuntimeError("the device is lost")

    async def test(engine: AsyncEngine, _: MediaParts) -> None:
        setattr(core.core.runner, name, fail)
        for _attempt in range(7):
            with pytest.raises(FailedRequestError):
                await engine.generate([1, 2, 3], GREEDY, request_id="r")
        task = asyncio.create_task(engine.generate([1, 2, 3], GREEDY, request_id="r"))
        await asyncio.to_thread(core.join)
        engine.disconnect("gone")
        with pytest.raises(EngineLostError):
            await task

    run(core, test)
    assert "8 steps of the core failed in a row: internal error: RuntimeError: the device" in str(
        core.error
    )


def test_frontends_share_a_core_and_one_that_ends_takes_its_requests_with_it(
    tmp_path: Path, tiny_model: Callable[[str], str]
) -> None:
    options = {"mm_processor_cache_type": "shm"}
    with run_core(tiny_model("qwen2_5_vl"), tmp_path, **options) as core:

        async def main() -> None:
            one, media_parts_one = core.make_frontend("f0-1")
            two, media_parts_two = core.make_frontend("f1-1")
            try:
                await one.connect(core.info)
                await two.connect(core.info)
                tasks = await start(one)
                chat = make_chat(IMAGES[0])
                task = asyncio.create_task(two.generate(chat, GREEDY, request_id="two"))
                core.loop.forget_frontend("f0-1")
                output = await task
                assert len(output.outputs[0].token_ids) == 8
                assert output.mm_items[0].is_processor_hit
                await wait_until_async(lambda: not core.core.scheduler.has_requests)
                await two.reset_cache("prefix")  # answered when the step before it is over
                assert not any(entry.done() for entry in tasks)
                one.disconnect("ended")
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(isinstance(result, EngineLostError) for result in results)
            finally:
                await one.close()
                await two.close()
                media_parts_one.close()
                media_parts_two.close()

        asyncio.run(asyncio.wait_for(main(), 120))
        core.assert_nothing_is_left()


def test_a_reset_that_arrives_late_keeps_newer_items(
    tmp_path: Path, tiny_model: Callable[[str], str]
) -> None:
    options = {"mm_processor_cache_type": "shm"}
    with run_core(tiny_model("qwen2_5_vl"), tmp_path, **options) as core:
        kept: list[tuple[bytes, ForgetMedia]] = []
        send, is_late = core.loop._send, threading.Event()

        def send_late(frontend: bytes, message: Any) -> None:
            if isinstance(message, ForgetMedia) and not is_late.is_set():
                kept.append((frontend, message))
                return
            while is_late.is_set() and kept:
                send(*kept.pop())
            send(frontend, message)

        core.loop._send = send_late  # type: ignore[method-assign]

        async def test(one: AsyncEngine, _: MediaParts) -> None:
            two, media_parts_two = core.make_frontend("f1-1")
            statistics = media_parts_two.caches.readonly.statistics
            try:
                await two.connect(core.info)
                await two.reset_cache("prefix")  # the core is connected to it now
                async with two.render(make_chat(IMAGES[1]), GREEDY, request_id="own"):
                    assert statistics().num_items == 1
                await one.reset_cache("mm")
                await one.generate(make_chat(IMAGES[0]), GREEDY, request_id="new")
                is_late.set()
                await two.reset_cache("prefix")  # answered after what was kept
                assert (kept, statistics().num_items) == ([], 0)
                again = await one.generate(make_chat(IMAGES[0]), GREEDY, request_id="again")
                assert again.mm_items[0].is_processor_hit
            finally:
                await two.close()
                media_parts_two.close()

        run(core, test)


@pytest.mark.parametrize("level", ["mm", "encoder", "prefix"])
def test_a_cache_that_is_reset_has_nothing(core: LocalCore, level: str) -> None:
    async def test(engine: AsyncEngine, _: MediaParts) -> None:
        async def ask() -> Any:
            return await engine.generate(make_chat(IMAGES[0]), GREEDY, request_id="r")

        await ask()
        if level == "encoder":
            await engine.reset_cache("prefix")  # or nothing would ask the encoder cache
        warm = await ask()
        if level == "encoder":
            await engine.reset_cache("prefix")
        await engine.reset_cache(level)
        cold = await ask()
        assert cold.outputs == warm.outputs
        if level == "mm":
            assert (warm.mm_items[0].is_processor_hit, cold.mm_items[0].is_processor_hit) == (
                True,
                False,
            )
        elif level == "encoder":
            assert (warm.num_encoder_hits, cold.num_encoder_hits) == (1, 0)
        else:
            assert warm.num_cached_tokens > 0
            assert cold.num_cached_tokens == 0

    run(core, test)


def test_the_core_drops_what_an_idle_leader_evicts(
    tmp_path: Path, tiny_model: Callable[[str], str]
) -> None:
    with run_core(tiny_model("qwen2_5_vl"), tmp_path) as core:

        async def test(engine: AsyncEngine, media_parts: MediaParts) -> None:
            for image in IMAGES:
                await engine.generate(make_chat(image), GREEDY, request_id="r")
            receiver: Any = core.core.payloads.receiver
            assert len(get_kept_sizes(receiver)) == 4
            media_parts.caches.sender.clear_cache()
            await wait_until_async(lambda: not get_kept_sizes(receiver))
            output = await engine.generate(make_chat(IMAGES[0]), GREEDY, request_id="r")
            assert not output.mm_items[0].is_processor_hit
            assert media_parts.caches.sender.statistics().num_resends == 0

        run(core, test)
