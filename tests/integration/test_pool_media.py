"""Other processes that preprocess media give the same tokens in the same order.

That holds when any of them dies, and nothing is left running.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sensorium import LLM, RequestError, SamplingParams
from tests.integration.media_steps import (
    GREEDY,
    OPTIONS,
    LlmOf,
    Outcomes,
    QueryCount,
    assert_idle,
    forget_outputs,
    generate,
    make_new_image,
    make_new_png,
    make_prompt,
    process,
    process_and_release,
    release,
)
from tests.support.engine import get_token_ids, make_llm
from tests.support.waiting import wait_until

# One process of the tests has these engines.
pytestmark = pytest.mark.xdist_group("pool_perception")
TinyModel = Callable[[str], str]
SIZES = {"lru": 2, "shm": 1}
with_caches = pytest.mark.parametrize("cache_type", SIZES)


@pytest.fixture(scope="module")
def _llms(tiny_model: TinyModel) -> Iterator[Callable[[str], LLM]]:
    llms: dict[str, LLM] = {}

    def get(cache_type: str) -> LLM:
        if cache_type not in llms:
            options = {**OPTIONS[cache_type], "mm_processor_pool_size": SIZES[cache_type]}
            llms[cache_type] = make_llm(tiny_model("llava"), max_model_len=256, **options)
        return llms[cache_type]

    yield get
    for llm in llms.values():
        close_and_check(llm)
    assert not find_threads("sensorium-pool", "prepare")


@pytest.fixture
def pooled(_llms: Callable[[str], LLM]) -> Iterator[LlmOf]:
    """An engine with a pool, idle before and after; its workers are ready."""
    used: dict[str, LLM] = {}

    def get(cache_type: str) -> LLM:
        llm = used[cache_type] = _llms(cache_type)
        assert get_pool(llm).wait_until_ready(240.0)
        return llm

    yield get
    for llm in used.values():
        assert_idle(llm)


def get_pool(llm: LLM) -> Any:
    assert llm.media_parts.pool is not None
    return llm.media_parts.pool


def close_and_check(llm: LLM) -> None:
    """Twice; no process is left."""
    process_ids = get_pool(llm).get_process_ids()
    assert process_ids
    llm.close()
    llm.close()
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def find_threads(*names: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


@contextmanager
def stopped(llm: LLM) -> Iterator[None]:
    """The workers do nothing for a while."""
    process_ids = get_pool(llm).get_process_ids()
    for process_id in process_ids:
        os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        for process_id in process_ids:
            os.kill(process_id, signal.SIGCONT)


def test_many_prompts_come_back_in_order_with_the_tokens_of_one_process(
    pooled: LlmOf, llm_of: LlmOf
) -> None:
    """Seeds that the engine draws are also given out in the order of the prompts."""
    llm, alone = pooled("lru"), llm_of("off")
    shared = make_new_png()
    prompts = [
        make_prompt(shared if index % 3 == 0 else make_new_png(), text=f"number {index}?")
        for index in range(12)
    ]
    prompts += [make_prompt(make_new_image()), "only text", make_prompt(shared, make_new_image())]
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    for engine in (llm, alone):
        engine.input_processor._seeds.seed(5)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    expected = alone.generate(prompts, params, use_tqdm=False)
    assert get_token_ids(outputs) == get_token_ids(expected)
    assert [output.prompt for output in outputs] == [output.prompt for output in expected]
    ids = [int(output.request_id.removeprefix("request-")) for output in outputs]
    assert ids == sorted(ids)
    assert len(set(get_token_ids(outputs))) > 8


@with_caches
def test_concurrent_requests_with_a_new_image_process_it_once(
    pooled: LlmOf, cache_type: str
) -> None:
    llm, prompt = pooled(cache_type), make_prompt(make_new_png())
    num_done, queries = get_pool(llm).statistics().num_done, QueryCount(llm)
    with stopped(llm):
        outcomes = Outcomes([lambda: process(llm, prompt) for _ in range(6)])
        flights = llm.media_parts.pipeline.flights
        wait_until(lambda: flights.num_waiting == 6)
    for result in outcomes.wait():
        release(llm, result)
    assert get_pool(llm).statistics().num_done == num_done + 1
    assert queries.get() == (6, 5)


@with_caches
def test_an_image_three_times_is_processed_once(
    pooled: LlmOf, llm_of: LlmOf, cache_type: str
) -> None:
    llm, data = pooled(cache_type), make_new_png()
    num_done, queries = get_pool(llm).statistics().num_done, QueryCount(llm)
    prompt = make_prompt(data, data, data)
    assert generate(llm, prompt) == generate(llm_of("off"), prompt)
    assert get_pool(llm).statistics().num_done == num_done + 1
    assert queries.get() == (3, 2)


@with_caches
def test_a_request_that_is_cancelled_leaves_nothing(pooled: LlmOf, cache_type: str) -> None:
    llm, known, data = pooled(cache_type), make_new_png(), make_new_png()
    process_and_release(llm, make_prompt(known))
    num_cancelled = get_pool(llm).statistics().num_cancelled
    cancelled: Future[None] = Future()
    with stopped(llm):
        prompt = make_prompt(known, data, make_new_png())
        outcomes = Outcomes([lambda: process(llm, prompt, cancelled=cancelled)])
        flights = llm.media_parts.pipeline.flights
        wait_until(lambda: flights.num_waiting == 2)
        cancelled.set_result(None)
        assert isinstance(outcomes.wait()[0], CancelledError)
        assert_idle(llm)
    assert get_pool(llm).statistics().num_cancelled == num_cancelled + 2
    process_and_release(llm, make_prompt(data))


@with_caches
def test_a_damaged_image_is_named_in_all_requests_with_it(pooled: LlmOf, cache_type: str) -> None:
    llm, data = pooled(cache_type), make_new_png()
    prompt = make_prompt(make_new_png(), data[:-30])
    with stopped(llm):
        outcomes = Outcomes([lambda: process(llm, prompt) for _ in range(3)])
        flights = llm.media_parts.pipeline.flights
        wait_until(lambda: flights.num_waiting == 6)
    errors = outcomes.wait()
    assert {type(error) for error in errors} == {RequestError}
    assert all(str(error).startswith("multi_modal_data.image[1]: ") for error in errors)


def test_readonly_requests_use_the_pool_and_keep_the_shared_memory(pooled: LlmOf) -> None:
    llm, prompt = pooled("shm"), make_prompt(make_new_png())
    before = llm.media_parts.caches.sender.statistics()
    for _ in range(2):
        processed = process(llm, prompt, skip_mm_cache=True)
        assert processed.items[0].handle.kwargs is not None
        release(llm, processed, readonly=True)
    assert llm.media_parts.caches.sender.statistics() == before


@with_caches
def test_an_interruption_ends_items_that_were_prepared_ahead(
    pooled: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm = pooled(cache_type)
    prompts = [make_prompt(make_new_png(), text=f"{index}") for index in range(10)]
    steps = count()
    step = llm._step

    def interrupted_step() -> Any:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm, "_step", interrupted_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    assert not find_threads("prepare")
    assert_idle(llm)
    assert len(generate(llm, *prompts)) == 10


def test_a_killed_worker_is_replaced_and_changes_no_token(
    pooled: LlmOf, llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = pooled("shm")
    prompts = [make_prompt(make_new_png(), text=f"{index}") for index in range(6)]
    taker: Any = llm.media_parts.pipeline.backend  # which passes all but embeddings on
    backend = taker.backend
    start, num_started = backend.start, count()

    def start_and_kill(job: Any, media: Any) -> Any:
        process_id = get_pool(llm).get_process_ids()[0]
        is_victim = next(num_started) == 2
        if is_victim:
            os.kill(process_id, signal.SIGSTOP)  # so that it dies with a job
        flight = start(job, media)
        if is_victim:
            os.kill(process_id, signal.SIGKILL)
        return flight

    monkeypatch.setattr(backend, "start", start_and_kill)
    num_restarts = get_pool(llm).statistics().num_restarts
    assert generate(llm, *prompts) == generate(llm_of("off"), *prompts)
    wait_until(lambda: get_pool(llm).statistics().num_restarts == num_restarts + 1)
    monkeypatch.undo()
    forget_outputs(llm)
    assert generate(llm, *prompts) == generate(llm_of("off"), *prompts)


def test_an_engine_that_is_left_by_an_exception_leaves_nothing(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """This engine has no pool, only what every engine has; the others are closed by their fixture.

    Its memory, shared or not, does not wait for the garbage collector.
    """
    path = tmp_path / "picture.png"
    path.write_bytes(make_new_png())
    options = {**OPTIONS["shm"], "allowed_local_media_path": tmp_path, "max_model_len": 256}
    engines: list[weakref.ref[LLM]] = []

    def use() -> None:
        with make_llm(tiny_model("llava"), **options) as llm:
            engines.append(weakref.ref(llm))
            generate(llm, make_prompt(path.as_uri()))
            raise RuntimeError("an error of the caller")

    threads = set(find_threads("media"))
    num_descriptors = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="of the caller"):
                use()
            num_descriptors.append(len(os.listdir("/proc/self/fd")))
        assert [engine() for engine in engines] == [None, None]
    finally:
        gc.enable()
    assert num_descriptors[1] <= num_descriptors[0]
    wait_until(lambda: set(find_threads("media")) <= threads)


def test_a_model_without_media_has_no_pool(tiny_model: TinyModel) -> None:
    llm = make_llm(tiny_model("llama"), mm_processor_pool_size=2)
    assert llm.media_parts.pool is None
    llm.close()
