"""Steps that are replayed give the same tokens, whatever runs in them and comes between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from sensorium.types.scheduling import StepMode
from sensorium.worker.graphs import encoder_graphs
from tests.parity.cases import FAMILIES, MULTIMODAL_FAMILIES, every_fourth
from tests.parity.graph_mistakes import GRAPH_MISTAKES, making_graph_mistake
from tests.parity.graph_parts import AgainRecorder, use_graphs
from tests.parity.reference import GREEDY, NUM_TOKENS, ReferenceOf, get_differences
from tests.support import overlap
from tests.support.engine import (
    ROOMS,
    Trace,
    assert_nothing_is_left,
    capture_encoders,
    get_kv_bytes,
    make_llm,
    make_probe,
    run_staggered,
)

# Why some steps of a family can't be replayed.
_EAGER = {
    "gemma3": {StepMode.EAGER_SPANS},
    "gemma4": {StepMode.EAGER_SPANS},
    "qwen3_vl": {StepMode.EAGER_INPUTS},
    "qwen3_vl_moe": {StepMode.EAGER_INPUTS},
}
# What their image encoders compute depends on the pixels: they leave out pictures of zeros.
_ENCODERS_THAT_LOOK = {"idefics3", "smolvlm"}


@pytest.mark.check("graphs")
@pytest.mark.parametrize("family", every_fourth(FAMILIES, 0))
def test_replayed_steps_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders = use_graphs(monkeypatch)
    reference = reference_of(family)
    llm = make_llm(reference.directory, max_num_batched_tokens=24)
    assert llm.config.graphs == "decoding in 4 sizes up to 8; prompts in 2 sizes up to 24"
    prompts = [entry.prompt for entry in reference.expected]
    for _ in range(2):  # fresh, then with what the first pass left in the caches
        outputs = run_staggered(llm, prompts, GREEDY)
        assert get_differences(outputs, reference.expected) == []
    steps = llm.core.scheduler.counters.steps
    assert steps[StepMode.DECODE_GRAPH] == recorders.decoding.num_replays > NUM_TOKENS
    assert steps[StepMode.SEGMENT_GRAPHS] == recorders.segments.num_replays > 0
    assert steps.keys() - {StepMode.DECODE_GRAPH, StepMode.SEGMENT_GRAPHS} == _EAGER.get(
        family, set()
    )
    assert_nothing_is_left(llm)


@pytest.mark.check("graphs")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("gemma3", marks=pytest.mark.slow),
        "llama",
        pytest.param("qwen2_5_vl", marks=pytest.mark.slow),
    ],
)
def test_preempted_requests_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_of(family)
    expected = [*reference.expected, *reversed(reference.expected)]
    longest = max(len(entry.prompt_token_ids) for entry in expected) + NUM_TOKENS
    kv_bytes = partial(get_kv_bytes, make_probe(reference.directory))
    recorders = use_graphs(monkeypatch)
    for room in ROOMS:
        llm = make_llm(
            reference.directory,
            max_model_len=longest,
            block_size=1,
            kv_cache_memory_bytes=kv_bytes(longest + room),
        )
        trace = Trace(llm)
        outputs = run_staggered(llm, [entry.prompt for entry in expected], GREEDY, steps_between=1)
        assert get_differences(outputs, expected) == []
        if trace.preempted_ids:
            break
    else:
        pytest.fail("no request was preempted")
    assert recorders.decoding.num_replays > 0


@pytest.mark.check("graphs")
@pytest.mark.parametrize("family", every_fourth(MULTIMODAL_FAMILIES, 1))
def test_replayed_encoders_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_graphs, "NUM_BEFORE_CAPTURE", 0)
    reference = reference_of(family)
    llm = make_llm(reference.directory)
    recorder = AgainRecorder()
    graphs = capture_encoders(llm, recorder)
    for salt in "ab":  # with another salt everything is encoded again
        for entry in reference.expected:
            prompt: Any = {**entry.prompt, "cache_salt": salt}
            outputs = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert get_differences(outputs, [entry]) == []
    if family in _ENCODERS_THAT_LOOK:
        assert graphs.num_graphs == 0
    else:
        assert graphs.refused == {}
        assert recorder.num_replays >= graphs.num_graphs > 0
    assert_nothing_is_left(llm)


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, marks=pytest.mark.slow if place % 2 else ())
        for place, mistake in enumerate(GRAPH_MISTAKES)
    ],
)
def test_a_mistake_in_what_a_replay_reads_is_seen(
    reference_of: ReferenceOf, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake == "tokens that are not passed on" and not overlap.is_on():
        pytest.skip("every token is read before the next step")
    use_graphs(monkeypatch)
    reference = reference_of("llama")
    llm = make_llm(reference.directory, max_num_batched_tokens=4096)
    with making_graph_mistake(mistake):
        outputs = run_staggered(llm, [entry.prompt for entry in reference.expected], GREEDY)
    assert get_differences(outputs, reference.expected) != []
