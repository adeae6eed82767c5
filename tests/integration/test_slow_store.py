"""A store of encoder outputs that does not answer delays only those who wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from sensorium import LLM, SamplingParams
from sensorium.multimodal.tiers.disk import DiskStore
from tests.integration.media_steps import forget_outputs, make_new_png, make_prompt
from tests.support.engine import assert_nothing_is_left, make_llm
from tests.support.waiting import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


class StuckDisk(DiskStore):
    """A disk that answers when it is let go: a network file system that is gone behaves so."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 2**30)
        self.lets_go = threading.Event()
        self.lets_go.set()
        self.asked: list[str] = []

    def get(self, name: str, *limits: int) -> bytearray | None:
        self.asked.append(name)
        assert self.lets_go.wait(120)
        return super().get(name, *limits)


@pytest.fixture(scope="module")
def llm(
    tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    with make_llm(tiny_model("llava"), mm_disk_cache=tmp_path_factory.mktemp("cache")) as llm:
        assert llm.core.loader is not None
        llm.core.loader._limit_s = 600.0
        yield llm


@pytest.fixture
def disk(llm: LLM) -> Iterator[StuckDisk]:
    tiers = llm.media_parts.tiers
    assert tiers is not None
    (own,) = tiers._stores
    assert isinstance(own, DiskStore)
    disk = StuckDisk(own._directory)
    tiers._stores = (disk,)
    yield disk
    disk.lets_go.set()
    check_idle(llm)
    tiers._stores = (own,)


def check_idle(llm: LLM) -> None:
    while llm.core.is_busy:  # a step of requests that have ended may still be under way
        llm._step()
    assert_nothing_is_left(llm)


def count(llm: LLM) -> tuple[int, int]:
    runner = llm.core.runner.encoder_runner
    return runner.num_encoded, runner.num_loaded


def remember(llm: LLM, *prompts: object) -> list[tuple[int, ...]]:
    """Let the store have the encoder outputs of prompts, and no memory of the core; the answers."""
    answers = [output.outputs[0].token_ids for output in llm.generate(list(prompts), GREEDY)]
    assert llm.media_parts.tiers is not None
    assert llm.media_parts.tiers.writer.wait(60)
    forget_outputs(llm)
    return answers


def finish(llm: LLM, *request_ids: str) -> list[tuple[int, ...]]:
    outputs = {}
    while len(outputs) < len(request_ids):
        found = llm._finish_streams([i for i in request_ids if i not in outputs])
        outputs |= {output.request_id: output for output in found}
    return [outputs[request_id].outputs[0].token_ids for request_id in request_ids]


def test_a_neighbour_gets_tokens_while_an_output_is_looked_up(llm: LLM, disk: StuckDisk) -> None:
    prompt = make_prompt(make_new_png())
    (expected,) = remember(llm, prompt)
    num_encoded, num_loaded = count(llm)
    disk.asked.clear()
    neighbour = llm.stream("What is it?", LONG)
    next(neighbour)
    disk.lets_go.clear()
    request_id = llm._add(prompt, GREEDY, is_streamed=True)
    num_tokens = 0
    for delta in islice(neighbour, 50):
        num_tokens += sum(len(each.token_ids) for each in delta.deltas)
    wait_until(lambda: disk.asked, "the look-up has begun")
    assert num_tokens >= 50
    assert not disk.lets_go.is_set(), "the look-up still hangs"
    assert llm.core.scheduler.held.keys() <= {request_id, f"{request_id}-0"}
    assert llm.core.scheduler.held
    disk.lets_go.set()
    assert finish(llm, request_id) == [expected]
    assert count(llm) == (num_encoded, num_loaded + 1)
    neighbour.close()


def test_an_engine_waits_if_there_is_nothing_else_to_do(llm: LLM, disk: StuckDisk) -> None:
    prompts = [make_prompt(make_new_png(), make_new_png()) for _ in range(3)]
    expected = remember(llm, *prompts)
    num_encoded, num_loaded = count(llm)
    disk.asked.clear()
    disk.lets_go.clear()
    ids = [llm._add(prompt, GREEDY, is_streamed=True) for prompt in (*prompts, *prompts)]
    assert not llm.core.has_requests
    assert llm.core.is_busy
    threading.Timer(0.1, disk.lets_go.set).start()
    assert finish(llm, *ids) == [*expected, *expected]
    assert count(llm) == (num_encoded, num_loaded + 6)
    looked_up = [name for name in disk.asked if "encoded" in name]
    assert len(looked_up) == len(set(looked_up)) == 6, "once for each item"


def test_a_request_may_leave_while_its_outputs_are_looked_up(llm: LLM, disk: StuckDisk) -> None:
    prompt = make_prompt(make_new_png())
    (expected,) = remember(llm, prompt)
    disk.asked.clear()
    disk.lets_go.clear()
    stay, leave = (llm._add(prompt, GREEDY, is_streamed=True) for _ in range(2))
    wait_until(lambda: disk.asked, "the look-up has begun")
    llm._abort((leave,))
    disk.lets_go.set()
    assert finish(llm, stay) == [expected]
    disk.lets_go.clear()
    forget_outputs(llm)
    leave = llm._add(prompt, GREEDY, is_streamed=True)
    llm._abort((leave,))
    check_idle(llm)


def test_a_look_up_that_takes_too_long_is_not_waited_for(llm: LLM, disk: StuckDisk) -> None:
    first, second = make_prompt(make_new_png()), make_prompt(make_new_png())
    expected = remember(llm, first, second)
    num_encoded, num_loaded = count(llm)
    assert llm.core.loader is not None
    disk.lets_go.clear()
    llm.core.loader._limit_s = 0.05
    try:
        outputs = llm.generate([first, second], GREEDY)
    finally:
        llm.core.loader._limit_s = 600.0
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert not disk.lets_go.is_set()
    assert count(llm) == (num_encoded + 2, num_loaded)
    disk.lets_go.set()
    forget_outputs(llm)

    def is_loaded() -> bool:
        forget_outputs(llm)
        before = count(llm)[1]
        llm.generate([first], GREEDY)
        return count(llm)[1] > before

    wait_until(is_loaded, "the store is asked again")


def test_caches_that_are_cleared_meanwhile_change_no_token(llm: LLM, disk: StuckDisk) -> None:
    prompt = make_prompt(make_new_png())
    (expected,) = remember(llm, prompt)
    for is_there_again in (False, True):
        disk.lets_go.clear()
        held = llm._add(prompt, GREEDY, is_streamed=True)
        if is_there_again:  # another request with a copy of the image was encoded meanwhile
            llm.core.loader, loader = None, llm.core.loader
            other = llm._add(prompt, GREEDY, is_streamed=True)
            assert finish(llm, other) == [expected]
            llm.core.loader = loader
        forget_outputs(llm)
        disk.lets_go.set()
        assert finish(llm, held) == [expected]
        forget_outputs(llm)
