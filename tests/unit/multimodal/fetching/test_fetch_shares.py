"""Turns are shared so that no request waits for the fetches of another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from sensorium.multimodal.fetching.fetch import FetchShares, RequestShare


class Fetches:
    """Fetches that run until they are ended, in the order in which they began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    def add(self, share: RequestShare, *names: str) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.ensure_future(self._run(share, name))

    async def _run(self, share: RequestShare, name: str) -> None:
        async with share:
            self.begun.append(name)
            await self._ends[name].wait()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await settle()

    async def cancel(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await settle()


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(test: Callable[[Fetches], Awaitable[None]]) -> None:
    async def start() -> None:
        fetches = Fetches()
        try:
            await test(fetches)
        finally:
            for task in fetches.tasks.values():
                task.cancel()
            await asyncio.gather(*fetches.tasks.values(), return_exceptions=True)

    asyncio.run(start())


def test_a_request_has_no_more_than_its_share_at_once() -> None:
    async def test(fetches: Fetches) -> None:
        fetches.add(RequestShare(FetchShares(max_per_request=2)), "a", "b", "c", "d")
        await settle()
        assert fetches.begun == ["a", "b"]
        await fetches.end("b")
        assert fetches.begun == ["a", "b", "c"]

    run(test)


def test_the_first_fetch_of_a_request_never_waits() -> None:
    async def test(fetches: Fetches) -> None:
        shares = FetchShares(max_per_request=8, max_shared=3)
        fetches.add(RequestShare(shares), *"abcdefgh")
        await settle()
        assert fetches.begun == [*"abcd"]
        for name in "xyz":
            fetches.add(RequestShare(shares), name)
        await settle()
        assert fetches.begun == [*"abcdxyz"]

    run(test)


def test_a_free_turn_goes_to_the_request_that_has_fewest() -> None:
    async def test(fetches: Fetches) -> None:
        shares = FetchShares(max_per_request=8, max_shared=2)
        fetches.add(RequestShare(shares), "a1", "a2", "a3", "a4", "a5")
        await settle()
        fetches.add(RequestShare(shares), "b1", "b2")
        fetches.add(RequestShare(shares), "c1", "c2")
        await settle()
        assert fetches.begun == ["a1", "a2", "a3", "b1", "c1"]
        await fetches.end("a1")
        await fetches.end("b1")
        assert fetches.begun[5:] == ["b2", "c2"]

    run(test)


def test_a_request_without_a_running_fetch_starts_its_next_one_although_the_room_is_full() -> None:
    async def test(fetches: Fetches) -> None:
        shares = FetchShares(max_per_request=8, max_shared=0)
        fetches.add(RequestShare(shares), "a1", "a2")
        fetches.add(RequestShare(shares), "b1", "b2")
        await settle()
        assert fetches.begun == ["a1", "b1"]
        await fetches.end("b1")
        assert fetches.begun == ["a1", "b1", "b2"]

    run(test)


def test_a_cancelled_fetch_gives_its_turn_to_the_next() -> None:
    async def test(fetches: Fetches) -> None:
        fetches.add(RequestShare(FetchShares(max_per_request=1)), "a", "b", "c")
        await settle()
        await fetches.cancel("b")
        await fetches.cancel("a")
        assert fetches.begun == ["a", "c"]

    run(test)


def test_a_turn_that_comes_together_with_a_cancellation_is_passed_on() -> None:
    async def test(fetches: Fetches) -> None:
        fetches.add(RequestShare(FetchShares(max_per_request=1)), "a", "b", "c")
        await settle()
        fetches.tasks["a"].cancel()
        await asyncio.sleep(0)  # "a" has ended, and "b" has its turn but has not run
        fetches.tasks["b"].cancel()
        await settle()
        assert fetches.begun == ["a", "c"]

    run(test)


@pytest.mark.parametrize("seed", range(20))
def test_the_rules_hold_in_any_order_of_starts_and_ends(seed: int) -> None:
    rng = random.Random(seed)

    async def test(fetches: Fetches) -> None:
        max_per_request, max_shared = rng.randint(1, 4), rng.randint(0, 5)
        shares = FetchShares(max_per_request=max_per_request, max_shared=max_shared)
        requests = [RequestShare(shares) for _ in range(5)]
        owner: dict[str, RequestShare] = {}
        for number in range(150):
            name, share = str(number), rng.choice(requests)
            owner[name] = share
            fetches.add(share, name)
            if rng.random() < 0.7:
                await settle()
            live = [each for each, task in fetches.tasks.items() if not task.done()]
            chosen = rng.sample(live, min(len(live), rng.randint(0, 2)))
            await (fetches.end if rng.random() < 0.5 else fetches.cancel)(*chosen)
            live = [each for each, task in fetches.tasks.items() if not task.done()]
            running = [each for each in live if each in fetches.begun]
            for request in requests:
                num_running = sum(owner[each] is request for each in running)
                num_wanted = sum(owner[each] is request for each in live)
                assert request.num_active == num_running <= max_per_request
                assert num_running >= min(1, num_wanted)
                if num_running < min(num_wanted, max_per_request):
                    assert shares.num_shared == max_shared  # then it is the room that is full
            assert shares.num_shared == sum(max(0, r.num_active - 1) for r in requests)
            assert shares.num_shared <= max_shared

    run(test)
