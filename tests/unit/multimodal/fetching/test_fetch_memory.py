"""Fetches hold a bounded number of bytes; the request that holds most gives way."""

from __future__ import annotations

import random

from sensorium.multimodal.fetching.fetch import FetchMemory, RequestBytes


def test_the_largest_request_gives_way_whichever_request_adds_the_last_byte() -> None:
    memory, refused = FetchMemory(100), []
    large, small = (memory.join(lambda name=name: refused.append(name)) for name in "ls")  # type: ignore[misc]
    large.add(80)
    small.add(20)
    assert refused == []
    small.add(1)
    assert (refused, large.is_refused, small.is_refused) == (["l"], True, False)
    small.add(70)  # the other one has not ended yet, but is on its way
    assert refused == ["l"]
    memory.leave(large)
    assert memory.num_bytes == 91
    memory.leave(small)
    assert memory.num_bytes == 0


def test_a_request_that_is_too_large_alone_gives_way() -> None:
    memory, refused = FetchMemory(100), []
    small = memory.join(lambda: refused.append("small"))
    small.add(10)
    alone = memory.join(lambda: refused.append("alone"))
    alone.add(200)
    assert refused == ["alone"]


def test_the_remaining_requests_never_exceed_the_limit() -> None:
    rng = random.Random(7)
    memory = FetchMemory(1000)
    requests: list[RequestBytes] = []
    for _ in range(2000):
        if not requests or rng.random() < 0.2:
            requests.append(memory.join(lambda: None))
        request = rng.choice(requests)
        if rng.random() < 0.2:
            requests.remove(request)
            memory.leave(request)
        elif not request.is_refused:
            request.add(rng.randint(1, 200))
        assert memory.num_bytes == sum(each.num_bytes for each in requests)
        assert sum(each.num_bytes for each in requests if not each.is_refused) <= 1000
