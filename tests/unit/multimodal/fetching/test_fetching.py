"""Fetches on their event loop: who waits for whom, look-ups, and the end of it all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import NoReturn

import pytest

from sensorium.multimodal.fetching.fetch import RefusedMediaError, SharedFetches
from sensorium.multimodal.fetching.hosts import AddressGuard
from sensorium.multimodal.fetching.http_client import FetchLoop
from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.types.errors import CapacityError, MediaFetchError
from tests.support.loading import BlockingLoader

KEY = ("http://host/", "image")
WAIT_S = 60.0
ADDRESS = "8.8.8.8"  # it is never dialled


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Source:
    """A source of media; `answers` has the answer to each fetch."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[MediaBytes]] = []

    async def fetch(self) -> MediaBytes:
        answer: asyncio.Future[MediaBytes] = asyncio.get_running_loop().create_future()
        self.answers.append(answer)
        return await answer


def test_callers_of_one_url_share_a_fetch_and_each_gets_its_own_error() -> None:
    async def run() -> None:
        shared, source = SharedFetches(), Source()
        tasks = [asyncio.ensure_future(shared.get(KEY, source.fetch)) for _ in range(3)]
        await settle()
        assert (len(source.answers), shared.num_waiting) == (1, 3)
        source.answers[0].set_exception(MediaFetchError("gone"))
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in errors] == ["gone"] * 3
        assert len(set(map(id, errors))) == 3
        again = asyncio.ensure_future(shared.get(KEY, source.fetch))
        await settle()
        source.answers[1].set_result(MediaBytes(b"picture"))
        assert (await again).data == b"picture"
        assert shared.num_waiting == 0

    asyncio.run(run())


def test_an_error_that_is_no_answer_of_the_host_is_not_shared() -> None:
    async def run() -> None:
        shared, source = SharedFetches(), Source()
        tasks = [asyncio.ensure_future(shared.get(KEY, source.fetch)) for _ in range(2)]
        await settle()
        source.answers[0].set_exception(ValueError("a fault of ours"))
        await settle()
        assert len(source.answers) == 2
        source.answers[1].set_result(media := MediaBytes(b"picture"))
        with pytest.raises(ValueError, match="a fault of ours"):
            await tasks[0]
        assert await tasks[1] is media
        assert shared.num_waiting == 0

    asyncio.run(run())


def test_a_waiting_caller_restarts_a_fetch_that_its_owner_left() -> None:
    async def run() -> None:
        shared, source = SharedFetches(), Source()
        tasks = [asyncio.ensure_future(shared.get(KEY, source.fetch)) for _ in range(3)]
        await settle()
        tasks[0].cancel()
        await settle()
        assert source.answers[0].cancelled()
        assert len(source.answers) == 2
        source.answers[1].set_result(media := MediaBytes(b"picture"))
        assert [await task for task in tasks[1:]] == [media, media]
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]

    asyncio.run(run())


def test_a_caller_that_waits_can_leave_without_ending_the_fetch() -> None:
    async def run() -> None:
        shared, source = SharedFetches(), Source()
        tasks = [asyncio.ensure_future(shared.get(KEY, source.fetch)) for _ in range(2)]
        await settle()
        tasks[1].cancel()
        await settle()
        source.answers[0].set_result(media := MediaBytes(b"picture"))
        assert await tasks[0] is media
        assert shared.num_waiting == 0

    asyncio.run(run())


class Resolver:
    """A resolver that finds addresses, and finds "slow" only when `is_over` is set."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def __call__(self, host: str, _: int) -> Sequence[str]:
        if host == "slow":
            self.is_over.wait(WAIT_S)
        return [ADDRESS]


def test_slow_host_look_ups_do_not_delay_others() -> None:
    """A hundred names have silent servers, and one has not."""

    async def run() -> None:
        resolve = Resolver()
        guard = AddressGuard(resolve, allow_private=False)
        slow = [asyncio.ensure_future(guard.look_up("slow", 80)) for _ in range(100)]
        await settle()
        assert await guard.look_up("quick", 80) == [ADDRESS]
        assert not any(task.done() for task in slow)
        resolve.is_over.set()
        assert await asyncio.gather(*slow) == [[ADDRESS]] * 100

    asyncio.run(run())


def test_an_abandoned_look_up_keeps_its_place_until_it_ends() -> None:
    async def run() -> None:
        resolve = Resolver()
        guard = AddressGuard(resolve, allow_private=False, max_look_ups=1)
        left = asyncio.ensure_future(guard.look_up("slow", 80))
        await settle()
        left.cancel()
        await settle()
        late = asyncio.ensure_future(guard.look_up("quick", 80))
        await settle()
        assert not late.done()
        resolve.is_over.set()
        assert await late == [ADDRESS]

    asyncio.run(run())


def test_a_system_without_threads_is_no_fault_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        guard = AddressGuard(Resolver(), allow_private=False, max_look_ups=1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(CapacityError, match="no thread"):
                await guard.look_up("host", 80)
        assert await guard.look_up("host", 80) == [ADDRESS]

    asyncio.run(run())


def test_closing_a_loop_cancels_what_runs_on_it_and_ends_its_thread() -> None:
    loop = FetchLoop()
    begun: Future[None] = Future()

    async def wait() -> None:
        begun.set_result(None)
        await asyncio.Event().wait()

    waiting = loop.submit(wait())
    begun.result(WAIT_S)
    loop.close()
    loop.close()
    with pytest.raises(CancelledError):
        waiting.result(WAIT_S)
    assert not loop._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(wait())


@pytest.mark.parametrize(
    ("deadline_s", "request_deadline_s", "text"),
    [
        (0.05, 60.0, "0.05 s"),
        (60.0, 0.07, "0.07 s, the limit for all media of one request together"),
    ],
)
def test_an_expired_fetch_names_the_limit_that_ended_it(
    deadline_s: float, request_deadline_s: float, text: str
) -> None:
    async def never_connect(*_: object) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    limits = MediaLimits(deadline_s=deadline_s, request_deadline_s=request_deadline_s)
    loader = BlockingLoader(limits, resolve=Resolver(), connect=never_connect)
    with pytest.raises(RefusedMediaError) as caught:
        loader.load("http://host/", "image")
    assert str(caught.value) == f"media from host: the media was not delivered within {text}"
    assert caught.value.reason == "deadline"
    loader.close()


def test_callers_that_wait_for_a_fetch_that_timed_out_start_their_own() -> None:
    async def run() -> None:
        shared, source = SharedFetches(), Source()
        tasks = [asyncio.ensure_future(shared.get(KEY, source.fetch)) for _ in range(2)]
        await settle()
        source.answers[0].set_exception(TimeoutError())
        await settle()
        source.answers[1].set_result(media := MediaBytes(b"picture"))
        late, other = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(late, TimeoutError)
        assert other is media

    asyncio.run(run())
