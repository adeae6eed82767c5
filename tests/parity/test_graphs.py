"""Steps that are replayed give the same tokens, whatever runs in them and comes between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from sensorium.worker.graphs import decode_buffers
from sensorium.worker.graphs.decode_buffers import DecodeBuffers
from tests.parity.cases import FAMILIES
from tests.parity.driver import (
    ROOMS,
    Trace,
    assert_nothing_is_left,
    get_kv_bytes,
    make_llm,
    run_staggered,
)
from tests.parity.graph_parts import use_graphs
from tests.parity.reference import GREEDY, NUM_TOKENS, ReferenceOf, get_differences


@pytest.mark.check("graphs")
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = use_graphs(monkeypatch)
    reference = reference_of(family)
    llm = make_llm(reference.directory, max_num_batched_tokens=24)
    assert llm.config.graphs == "decoding, 4 batch sizes up to 8"
    prompts = [entry.prompt for entry in reference.expected]
    for _ in range(2):  # fresh, then with what the first pass left in the caches
        outputs = run_staggered(llm, prompts, GREEDY)
        assert get_differences(outputs, reference.expected) == []
    assert recorder.num_replays > NUM_TOKENS
    assert_nothing_is_left(llm)


@pytest.mark.check("graphs")
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2_5_vl"])
def test_preempted_requests_give_the_reference_tokens(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_of(family)
    expected = [*reference.expected, *reversed(reference.expected)]
    longest = max(len(entry.prompt_token_ids) for entry in expected) + NUM_TOKENS
    kv_bytes = partial(get_kv_bytes, make_llm(reference.directory, block_size=1))
    recorder = use_graphs(monkeypatch)
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
        pytest.fail("nobody was preempted")
    assert recorder.num_replays > 0


@pytest.mark.parametrize(
    "mistake", ["padding that writes", "a shifted slot", "stale block tables", "stale lengths"]
)
def test_a_mistake_in_what_a_replay_reads_is_seen(
    reference_of: ReferenceOf, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_graphs(monkeypatch)
    reference = reference_of("llama")
    llm = make_llm(reference.directory, max_num_batched_tokens=4096)
    _make_mistake(mistake, monkeypatch)
    outputs = run_staggered(llm, [entry.prompt for entry in reference.expected], GREEDY)
    assert get_differences(outputs, reference.expected) != []


def _make_mistake(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_arrays = DecodeBuffers._make_arrays

    def change(self: DecodeBuffers, rows: Any, size: int) -> Any:
        arrays: Any = make_arrays(self, rows, size)
        if mistake == "a shifted slot":
            arrays["slots0"][: len(rows)] += 1
        if mistake == "stale lengths":
            arrays["seq_lens"][: len(rows)] -= 1
        return arrays

    if mistake == "padding that writes":
        monkeypatch.setattr(decode_buffers, "_NO_SLOT", 17)  # in the first request's first block
    elif mistake == "stale block tables":
        monkeypatch.setattr(
            DecodeBuffers,
            "_make_table",
            staticmethod(lambda rows, _: np.zeros((len(rows), 0), dtype=np.int64)),
        )
    else:
        monkeypatch.setattr(DecodeBuffers, "_make_arrays", change)
