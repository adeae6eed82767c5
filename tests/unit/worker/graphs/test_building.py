"""Graphs are made where they can be, and where not, the reason is known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sensorium import LLM, SamplingParams
from sensorium.models.adapter import ModelAdapter
from sensorium.types.scheduling import StepMode
from sensorium.worker.graphs import building
from tests.parity.graph_parts import AgainRecorder, use_graphs

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
    assert _count_steps(llm) == {"eager_prompt": 1, "decode_graph": 4}
    llm.generate([[1, 2, index] for index in range(3)], params, use_tqdm=False)
    assert _count_steps(llm) == {"eager_prompt": 2, "decode_graph": 4, "eager_large_batch": 4}


def test_enforce_eager_turns_graphs_off(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = use_graphs(monkeypatch)
    llm = make_llm(tiny_model("llama"), enforce_eager=True)
    assert llm.config.graphs == "none: enforce_eager"
    assert recorder.recordings == []


class _FailingRecorder(AgainRecorder):
    def record(self, function: Any) -> Any:
        del function
        raise RuntimeError("operation not permitted\nwhen stream is capturing")


class _WrongRecorder(AgainRecorder):
    """Its replays give something else."""

    def record(self, function: Any) -> Any:
        recording = super().record(function)
        recording._function = lambda: tuple(tensor + 1 for tensor in function())
        return recording


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (_FailingRecorder(), "operation not permitted when stream is capturing"),
        (_WrongRecorder(), "a replay of 8 rows gave logits that are off by 1"),
    ],
)
def test_a_model_that_cannot_be_captured_runs_without(
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    recorder: AgainRecorder,
    reason: str,
) -> None:
    use_graphs(monkeypatch, recorder)
    monkeypatch.setattr(building, "_is_worth_a_warning", lambda _: True)
    with caplog.at_level(logging.WARNING):
        llm = make_llm(tiny_model("llama"), max_num_seqs=8)
    assert reason in llm.config.graphs
    assert (
        f"steps run without CUDA graphs: {llm.config.graphs.removeprefix('none: ')}" in caplog.text
    )
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)


def test_what_no_kernel_can_do_is_no_error(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the trial of the kernels may fail, for reasons that nobody foresaw."""
    monkeypatch.setattr(building.kernels, "find_obstacle", lambda _: None)
    directory = tiny_model("llama")
    from sensorium.models.loading import load_config, load_model

    cpu = torch.device("cpu")
    adapter: ModelAdapter = load_model(
        directory, load_config(directory), dtype=torch.float32, device=cpu
    )
    found = building.find_graph_parts(adapter, adapter.probe_layers(), block_size=16)
    assert isinstance(found, str)
    assert "a trial failed" in found
