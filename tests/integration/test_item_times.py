"""What a caller learns of the time that its media took: the stages that ran, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sensorium import LLM
from sensorium.engine.inputs.renderer import Prepared
from sensorium.types.multimodal import ITEM_STAGES, ItemTimes
from sensorium.types.outputs import RequestOutput
from tests.integration.media_steps import (
    CACHE_TYPES,
    GREEDY,
    OPTIONS,
    Gate,
    LlmOf,
    Outcomes,
    forget_outputs,
    make_new_image,
    make_new_png,
    make_prompt,
    make_uuid_prompt,
    process,
    release,
)
from tests.support.engine import make_llm
from tests.support.waiting import wait_until

with_caches = pytest.mark.parametrize("cache_type", CACHE_TYPES)


def run(llm: LLM, prompt: Any) -> RequestOutput:
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    return output


def get_stages(times: ItemTimes) -> list[str]:
    assert all(seconds >= 0 for seconds in times.values())
    assert set(times) <= set(ITEM_STAGES)
    return [stage for stage in ITEM_STAGES if stage in times]


def get_all_stages(output: RequestOutput) -> list[list[str]]:
    return [get_stages(item.times) for item in output.mm_items]


@with_caches
def test_a_cached_item_was_only_fetched_and_hashed(llm_of: LlmOf, cache_type: str) -> None:
    llm, data, image = llm_of(cache_type), make_new_png(), make_new_image()
    prompt = make_prompt(data, image)
    assert get_all_stages(run(llm, prompt)) == [
        ["fetch", "hash", "decode", "process"],
        ["hash", "process"],
    ]
    assert get_all_stages(run(llm, prompt)) == [["fetch", "hash"], ["hash"]]


def test_a_uuid_avoids_the_fetch(llm_of: LlmOf) -> None:
    llm, data = llm_of("lru"), make_new_png()
    run(llm, make_uuid_prompt(data, "times"))
    assert get_all_stages(run(llm, make_uuid_prompt(None, "times"))) == [["hash"]]
    url = "https://nowhere.example/picture.png"
    assert get_all_stages(run(llm, make_uuid_prompt(url, "times"))) == [["hash"]]


@with_caches
def test_a_request_that_joins_another_waits_and_does_not_process(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str
) -> None:
    llm, data = llm_of(cache_type), make_new_png()
    gate, pipeline = Gate(monkeypatch), llm.media_parts.pipeline
    outcomes = Outcomes([lambda: process(llm, make_prompt(data)) for _ in range(2)])
    wait_until(lambda: pipeline.flights.num_waiting == 2)
    gate.open()
    results = outcomes.wait()
    stages = sorted(get_stages(result.items[0].times) for result in results)
    assert stages == [["fetch", "hash", "decode", "process"], ["fetch", "hash", "wait"]]
    for result in results:
        release(llm, result)


@pytest.mark.parametrize("cache_type", ["lru", pytest.param("shm", marks=pytest.mark.slow)])
def test_pool_workers_report_how_long_they_took(
    tiny_model: Callable[[str], str], cache_type: str
) -> None:
    options = {**OPTIONS[cache_type], "mm_processor_pool_size": 1}
    with make_llm(tiny_model("llava"), max_model_len=256, **options) as llm:
        output = run(llm, make_prompt(make_new_png(), make_new_image()))
    assert get_all_stages(output) == [["fetch", "hash", "decode", "process"], ["hash", "process"]]
    assert all(item.times["process"] > 0 for item in output.mm_items)


def test_processing_an_item_again_counts(llm_of: LlmOf) -> None:
    llm, prompt = llm_of("lru"), make_prompt(make_new_png())
    run(llm, prompt)
    forget_outputs(llm)
    processed = llm.input_processor.process("times", prompt, GREEDY)
    assert get_stages(processed.items[0].times) == ["fetch", "hash"]
    llm.core.payloads.receiver.clear_cache()
    llm._start(Prepared(processed=processed, stages={}))
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs += llm._step()
    assert get_all_stages(outputs[0]) == [["fetch", "hash", "decode", "process"]]
    assert outputs[0].stages["transfer"] >= 0


def test_an_output_has_the_times_of_its_request_and_the_cached_encodings(
    llm_of: LlmOf,
) -> None:
    llm, known, new = llm_of("lru"), make_new_png(), make_new_png()
    first = run(llm, make_prompt(known))
    assert first.times is not None
    assert first.times.encode_s > 0
    moments = [first.times.scheduled, first.times.first_token, first.times.finished]
    assert None not in moments
    assert first.times.arrived <= moments[0] <= moments[1] <= moments[2]  # type: ignore[operator]
    second = run(llm, make_prompt(new, known, text="and these?"))
    assert second.encoder_hits == (1,)
    assert second.num_encoder_hits == 1
    text = run(llm, "no media")
    assert text.times is not None
    assert (text.times.encode_s, text.encoder_hits) == (0.0, ())
