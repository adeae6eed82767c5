"""The core may lose media at any moment, and requests continue.

Only media that the caller itself left out can be missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from sensorium import LLM, RequestError, RequestOutput, SamplingParams
from sensorium.engine.inputs.renderer import Prepared
from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.multimodal.cache.shm import ShmReceiver
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.types.errors import CapacityError, MissingMediaError
from tests.integration.media_steps import (
    CACHE_TYPES,
    GREEDY,
    Calls,
    LlmOf,
    QueryCount,
    assert_idle,
    forget_outputs,
    generate,
    make_new_png,
    make_prompt,
    make_uuid_prompt,
    process,
    release,
)
from tests.integration.rendering import make_hash, render
from tests.support.engine import MAX_STEPS, get_token_ids, make_llm

LONG = "the quick brown fox jumps over the lazy dog " * 60
TinyModel = Callable[[str], str]
Lose = Callable[[LLM], None]


def restart(llm: LLM) -> None:
    """The core's half begins a new life, without anything."""
    caches: Any = llm.media_parts.caches
    if caches.store is None:
        llm.core.payloads.receiver = MirrorReceiver()
    else:
        caches.store.clear_cache()


def reset_core(llm: LLM) -> None:
    llm.core.payloads.receiver.clear_cache()


def reset_frontend(llm: LLM) -> None:
    llm.media_parts.caches.sender.clear_cache()


LOSSES = {
    "restart": restart,
    "reset of the core": reset_core,
    "reset of the sender": reset_frontend,
}
with_losses = pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
with_caches = pytest.mark.parametrize("cache_type", CACHE_TYPES)


@pytest.fixture(autouse=True)
def _keep_receivers(llm_of: LlmOf) -> Iterator[None]:
    """Put the receiver back that was there before the test."""
    llm = llm_of("shm")
    receiver = llm.core.payloads.receiver
    yield
    assert not llm.core.scheduler.has_requests
    llm.core.payloads.receiver = receiver


def start(llm: LLM, prompt: Any, params: SamplingParams) -> None:
    llm._start(llm.renderer.render(prompt, params, request_id="completions"))


def run(llm: LLM, request_id: str) -> RequestOutput:
    for _ in range(MAX_STEPS):
        for output in llm._step():
            if output.request_id == request_id:
                return output
    raise AssertionError("it does not end")


@with_losses
@with_caches
def test_media_lost_between_requests_is_sent_again(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str, lose: Lose
) -> None:
    llm, prompt = llm_of(cache_type), make_prompt(make_new_png(), make_new_png())
    expected = generate(llm_of("off"), prompt)
    assert generate(llm, prompt) == expected
    lose(llm)
    forget_outputs(llm)
    calls, queries = Calls(monkeypatch, llm), QueryCount(llm)
    assert generate(llm, prompt) == expected
    assert calls.take() == {"decode": 2, "process": 2, "call": 2}
    if cache_type == "lru":
        assert queries.num_resends == (0 if lose is reset_frontend else 2)
    forget_outputs(llm)
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert get_token_ids([output]) == expected
    assert calls.take() == {}
    assert {item.transfer for item in output.mm_items} == {
        "none" if cache_type == "lru" else "shared"
    }


@with_losses
@with_caches
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_media_lost_on_the_way_to_the_core_is_sent_again(
    llm_of: LlmOf,
    monkeypatch: pytest.MonkeyPatch,
    cache_type: str,
    lose: Lose,
    is_warm: bool,
) -> None:
    llm, prompt = llm_of(cache_type), make_prompt(make_new_png())
    expected = generate(llm_of("off"), prompt)
    if is_warm:
        generate(llm, prompt)
        forget_outputs(llm)
    processed = llm.input_processor.process("on its way", prompt, GREEDY)
    assert processed.items[0].handle.is_hit == is_warm
    calls = Calls(monkeypatch, llm)
    lose(llm)
    output = run(llm, llm._start(Prepared(processed=processed, stages={})))
    assert get_token_ids([output]) == expected
    # Only what the core alone had has to be processed again.
    is_gone = cache_type == "lru" and is_warm
    assert calls.take() == ({"decode": 1, "process": 1, "call": 1} if is_gone else {})
    forget_outputs(llm)
    assert generate(llm, prompt) == expected


@with_caches
def test_a_request_may_have_lost_some_of_its_items(llm_of: LlmOf, cache_type: str) -> None:
    llm, images = llm_of(cache_type), [make_new_png() for _ in range(3)]
    prompt = make_prompt(images[0], images[1], images[2], images[0])
    expected = generate(llm_of("off"), prompt)
    generate(llm, make_prompt(images[0]))
    generate(llm, make_prompt(images[1]))
    forget_outputs(llm)
    restart(llm)
    assert generate(llm, prompt) == expected


def test_a_core_that_does_not_see_the_shared_memory_gets_tensors(llm_of: LlmOf) -> None:
    llm, prompt = llm_of("shm"), make_prompt(make_new_png(), make_new_png())
    expected = generate(llm_of("off"), prompt)
    with closing(ShmStore.create(capacity_bytes=2**20, max_object_bytes=2**20)) as other:
        own, llm.core.payloads.receiver = llm.core.payloads.receiver, ShmReceiver(other)
        queries = QueryCount(llm)
        for num_resends in (2, 4):
            forget_outputs(llm)
            assert generate(llm, prompt) == expected
            assert queries.num_resends == num_resends
        assert other.statistics().num_items == 0
    llm.core.payloads.receiver = own
    forget_outputs(llm)
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert get_token_ids([output]) == expected
    assert {item.transfer for item in output.mm_items} == {"shared"}


@with_losses
@with_caches
def test_other_completions_get_media_that_was_lost_after_the_first(
    llm_of: LlmOf, cache_type: str, lose: Lose
) -> None:
    llm, prompt = llm_of(cache_type), make_prompt(make_new_png())
    (expected,) = generate(llm_of("off"), prompt)
    params = replace(GREEDY, n=3)
    start(llm, prompt, params)
    lose(llm)
    output = run(llm, "completions")
    assert output.error is None
    assert [entry.token_ids for entry in output.outputs] == [expected] * 3


@with_caches
def test_other_completions_get_tensors_of_the_caller(llm_of: LlmOf, cache_type: str) -> None:
    llm, prompt = llm_of(cache_type), make_prompt(make_new_png())
    (expected,) = generate(llm_of("off"), prompt)
    rendered = render(llm, prompt).make_prompt(make_hash())
    start(llm, rendered, replace(GREEDY, n=3))
    restart(llm)
    output = run(llm, "completions")
    assert [entry.token_ids for entry in output.outputs] == [expected] * 3


def test_media_that_the_caller_left_out_is_missing_when_it_is_lost(llm_of: LlmOf) -> None:
    llm, data = llm_of("lru"), make_new_png()
    good = make_prompt(data)
    expected = generate(llm_of("off"), good)
    generate(llm, make_uuid_prompt(data, "left out"))
    mm_hash = process_hash(llm, data)
    named = make_uuid_prompt(None, "left out")
    hashed = render(llm, good).make_prompt(mm_hash, mm_kwargs={})
    restart(llm)
    for prompt in (named, hashed):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False, return_errors=True)
        assert isinstance(output.error, MissingMediaError)
        assert len(output.error.missing) == 1
        assert_idle(llm)
    forget_outputs(llm)
    assert generate(llm, good) == expected
    assert generate(llm, named, hashed) == expected * 2


def process_hash(llm: LLM, data: bytes) -> str:
    processed = process(llm, make_prompt(data))
    release(llm, processed)
    return processed.items[0].handle.mm_hash


def test_completions_of_media_that_is_missing_end_together(llm_of: LlmOf) -> None:
    llm, data = llm_of("lru"), make_new_png()
    generate(llm, make_uuid_prompt(data, "left out by completions"))
    prompt = make_uuid_prompt(None, "left out by completions")
    start(llm, prompt, replace(GREEDY, n=3))
    restart(llm)
    output = run(llm, "completions")
    assert "is in no cache" in str(output.error)
    assert not llm.core.scheduler.has_requests


def test_a_completion_that_can_not_start_ends_the_others(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of("lru")
    add_request = llm.core.add_request
    start(llm, make_prompt(make_new_png()), replace(GREEDY, n=4))
    results = iter([None, CapacityError("no room for this one")])

    def add_or_fail(request: Any, transfer: Any) -> Any:
        error = next(results, None)
        if error is not None:
            raise error
        return add_request(request, transfer)

    monkeypatch.setattr(llm.core, "add_request", add_or_fail)
    output = run(llm, "completions")
    assert "no room for this one" in str(output.error)
    assert not llm.core.scheduler.has_requests


class ForgetfulReceiver(MirrorReceiver):
    """Loses everything whenever something comes."""

    def receive(self, mm_hashes: Any, transfer: Any) -> Any:
        self.clear_cache()
        return super().receive(mm_hashes, transfer)


def test_a_core_that_keeps_nothing_is_given_up(llm_of: LlmOf) -> None:
    llm, prompt = llm_of("lru"), make_prompt(make_new_png())
    expected = generate(llm_of("off"), prompt)
    llm.core.payloads.receiver = ForgetfulReceiver()
    outputs = llm.generate([prompt, "hello"], GREEDY, use_tqdm=False, return_errors=True)
    assert "the media cache lost items of this request" in str(outputs[0].error)
    llm.core.payloads.receiver = MirrorReceiver()
    assert_idle(llm)
    assert generate(llm, prompt) == expected


@with_caches
@pytest.mark.parametrize("n", [1, 3])
def test_a_refusal_by_the_core_releases_everything_without_a_second_lookup(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str, n: int
) -> None:
    llm, data = llm_of(cache_type), make_new_png()
    calls, queries = Calls(monkeypatch, llm), QueryCount(llm)
    params = replace(GREEDY, n=n)
    # The input processor would refuse it first: here it has to reach the core.
    monkeypatch.setattr(llm.input_processor, "max_model_len", None)
    with pytest.raises(RequestError, match="256"):
        llm.generate(make_prompt(data, text=LONG), params, use_tqdm=False)
    assert_idle(llm)
    assert calls.take() == {"decode": 1, "process": 1, "call": 1}
    outputs = llm.generate(make_prompt(data), params, use_tqdm=False)
    assert calls.take() == {}
    assert queries.get() == (2, 1)
    assert outputs[0].mm_items[0].transfer == ("none" if cache_type == "lru" else "shared")
    (expected,) = generate(llm_of("off"), make_prompt(data))
    assert {entry.token_ids for entry in outputs[0].outputs} == {expected}


@with_caches
def test_tokens_are_right_whatever_is_lost_and_evicted(
    tiny_model: TinyModel, llm_of: LlmOf, cache_type: str
) -> None:
    """Room for two images and a half; five of them, in requests that want up to three."""
    chance = random.Random(4)
    images = [make_new_png() for _ in range(5)]
    size = process_size(llm_of("off"), images[0])
    expected: dict[tuple[int, ...], Any] = {}
    options = {
        "mm_processor_cache_type": cache_type,
        "mm_processor_cache_gb": 2.5 * size / 2**30,
        "enable_prefix_caching": False,
        "encoder_cache_size": 48,
    }
    with make_llm(tiny_model("llava"), max_model_len=256, **options) as llm:
        for _ in range(12):
            orders = [
                tuple(chance.choices(range(5), k=chance.randint(1, 3)))
                for _ in range(chance.randint(1, 3))
            ]
            prompts = [make_prompt(*(images[index] for index in order)) for order in orders]
            for order, prompt in zip(orders, prompts, strict=True):
                if order not in expected:
                    (expected[order],) = generate(llm_of("off"), prompt)
            if chance.random() < 0.5:
                chance.choice([restart, reset_core, reset_frontend])(llm)
            if chance.random() < 0.3:
                with pytest.raises(RequestError):
                    generate(llm, make_prompt(images[chance.randrange(5)], text=LONG))
            ids = [llm._add(prompt, GREEDY) for prompt in prompts]
            if chance.random() < 0.3:
                chance.choice([restart, reset_core, reset_frontend])(llm)
            outputs = {}
            while llm.core.has_requests:
                outputs |= {output.request_id: output for output in llm._step()}
            found = get_token_ids([outputs[request_id] for request_id in ids])
            assert found == [expected[order] for order in orders]
            assert_idle(llm)
        statistics = llm.media_parts.caches.sender.statistics()
        assert statistics.num_evictions > 1
        assert statistics.num_bytes <= statistics.capacity_bytes
        assert cache_type == "shm" or statistics.num_resends > 2


def process_size(llm: LLM, data: bytes) -> int:
    processed = process(llm, make_prompt(data))
    release(llm, processed)
    return processed.items[0].handle.num_bytes
