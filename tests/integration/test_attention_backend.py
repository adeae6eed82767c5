"""A caller may name the attention backend, and hears why it can't be had."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sensorium import LLM, ModelError


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_cpu_attends_by_gathering(tiny_model: Callable[[str], str], name: str) -> None:
    llm = LLM(tiny_model("llama"), device="cpu", max_model_len=64, attention_backend=name)
    assert llm.config.attention_backend == "torch"


@pytest.mark.parametrize("name", ["flashinfer", "varlen", "triton"])
def test_a_backend_for_gpus_is_refused_on_a_cpu(
    tiny_model: Callable[[str], str], name: str
) -> None:
    with pytest.raises(ModelError, match=f"attention_backend='{name}' can't be used: it needs"):
        LLM(tiny_model("llama"), device="cpu", max_model_len=64, attention_backend=name)


def test_an_unknown_backend_is_refused_by_name(tiny_model: Callable[[str], str]) -> None:
    with pytest.raises(ModelError, match="unknown attention_backend 'cutlass': use auto, flash"):
        LLM(tiny_model("llama"), device="cpu", max_model_len=64, attention_backend="cutlass")
