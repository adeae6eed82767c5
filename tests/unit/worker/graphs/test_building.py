"""Graphs are made where they can be, and where not, the reason is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sensorium import LLM, SamplingParams
from sensorium.models.loading import load_config, load_model
from sensorium.types.scheduling import StepMode
from sensorium.worker.graphs import building
from tests.parity.graph_parts import (
    AgainRecorder,
    Recorders,
    use_graphs,
)

TinyModel = Callable[[str], str]


def make_llm(directory: str, **options: Any) -> LLM:
    return LLM(directory, max_model_len=256, dtype="float32", device="cpu", **options)


def _count_steps(llm: LLM) -> dict[str, int]:
    return {str(mode): count for mode, count in llm.core.scheduler.counters.steps.items()}


def test_on_a_cpu_there_are_no_graphs(tiny_model: TinyModel) -> None:
    llm = make_llm(tiny_model("llama"))
    assert llm.config.graphs == "none: it needs a CUDA device, not cpu"
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
    assert _count_steps(llm).keys() == {str(StepMode.EAGER_NO_GRAPHS)}


def test_steps_are_counted_by_how_they_were_computed(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_graphs(monkeypatch)
    llm = make_llm(tiny_model("llama"), max_num_seqs=4, cuda_graph_sizes=[1, 2])
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert _count_steps(llm) == {"segment_graphs": 1, "decode_graph": 4}
    llm.generate([[1, 2, index] for index in range(3)], params, use_tqdm=False)
    assert _count_steps(llm) == {"segment_graphs": 6, "decode_graph": 4}


def test_all_sizes_leave_their_logits_in_the_same_memory(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_graphs(monkeypatch)
    llm = make_llm(tiny_model("llama"), max_num_seqs=4, cuda_graph_sizes=[1, 2, 100])
    assert llm.config.graphs.startswith("decoding in 3 sizes up to 4;")
    runner: Any = llm.core.runner
    captured = runner._graphs.decoding._captured
    assert {size: len(entry.results.logits) for size, entry in captured.items()} == {
        4: 4,
        2: 2,
        1: 1,
    }
    assert len({entry.results.logits.data_ptr() for entry in captured.values()}) == 1
    assert len({entry.results.likeliest.data_ptr() for entry in captured.values()}) == 1


def test_enforce_eager_turns_graphs_off(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders = use_graphs(monkeypatch)
    llm = make_llm(tiny_model("llama"), enforce_eager=True)
    assert llm.config.graphs == "none: they are turned off (enforce_eager)"
    assert recorders.decoding.recordings == []
    assert recorders.segments.recordings == []


class _FailingRecorder(AgainRecorder):
    def record(self, function: Any) -> Any:
        del function
        raise RuntimeError("operation not permitted\nwhen stream is capturing")


class _WrongRecorder(AgainRecorder):
    """Its replays compute nothing."""

    def record(self, function: Any) -> Any:
        recording = super().record(function)
        recording._function = lambda _: None
        return recording


class _FailingSegments(AgainRecorder):
    def record(self, function: Any) -> Any:
        function(lambda _: None)
        raise RuntimeError("operation not permitted when stream is capturing")


class _WrongSegments(AgainRecorder):
    def record(self, function: Any) -> Any:
        recording = super().record(function)
        recording._function = lambda _: function(lambda _: None)  # no attention at all
        return recording


@pytest.mark.parametrize(
    ("recorders", "reason", "steps"),
    [
        (
            Recorders(decoding=_FailingRecorder()),
            "decoding not captured (RuntimeError: operation not permitted when stream is",
            {"segment_graphs": 5},
        ),
        (
            Recorders(decoding=_WrongRecorder()),
            "decoding not captured (a replay of 8 rows gave logits that are off by nan)",
            {"segment_graphs": 5},
        ),
        (
            Recorders(segments=_FailingSegments()),
            "prompts not captured (RuntimeError: operation not permitted when stream is capturing)",
            {"eager_no_graphs": 1, "decode_graph": 4},
        ),
        (
            Recorders(segments=_WrongSegments()),
            "prompts not captured (a replay of 512 tokens is off by",
            {"eager_no_graphs": 1, "decode_graph": 4},
        ),
    ],
)
def test_a_model_that_can_not_be_captured_runs_without_graphs(
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    recorders: Recorders,
    reason: str,
    steps: dict[str, int],
) -> None:
    directory = tiny_model("llama")
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = make_llm(directory).generate([[1, 2, 3]], params, use_tqdm=False)
    use_graphs(monkeypatch, recorders)
    llm = make_llm(directory, max_num_seqs=8)
    assert reason in llm.config.graphs
    found = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert _count_steps(llm) == steps
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_attention_that_no_kernel_can_capture_is_no_error(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the trial of the kernels may fail, for any reason."""

    def fail(**_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(building.kernels, "find_obstacle", lambda _: None)
    monkeypatch.setattr(building, "TritonPagedAttention", fail)
    directory = tiny_model("llama")
    hf_model = load_model(
        directory, load_config(directory), dtype=torch.float32, device=torch.device("cpu")
    )
    found = building.find_graph_parts(hf_model, hf_model.probe_layers(), block_size=16)
    assert found == "a trial of the decode kernels failed: RuntimeError: no compiler"
