"""A caller may name the attention backend, and gets the reason if it can't be had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sensorium import LLM, ModelError, SamplingParams
from sensorium.layers.attention.torch_backend import use_ready_kernels


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_cpu_uses_the_torch_backend(tiny_model: Callable[[str], str], name: str) -> None:
    llm = LLM(tiny_model("llama"), device="cpu", max_model_len=64, attention_backend=name)
    assert llm.config.attention_backend == "torch"


@pytest.mark.parametrize("name", ["flashinfer", "varlen", "triton"])
def test_a_backend_for_gpus_is_refused_on_a_cpu(
    tiny_model: Callable[[str], str], name: str
) -> None:
    with pytest.raises(ModelError, match=f"attention_backend='{name}' can't be used: it needs"):
        LLM(tiny_model("llama"), device="cpu", max_model_len=64, attention_backend=name)


def test_an_unknown_backend_is_refused_by_name(tiny_model: Callable[[str], str]) -> None:
    with pytest.raises(ModelError, match=r"attention_backend must be auto, .*, not 'cutlass'"):
        LLM(tiny_model("llama"), device="cpu", max_model_len=64, attention_backend="cutlass")


def test_steps_use_no_kernel_that_is_compiled_for_each_length(
    tiny_model: Callable[[str], str],
) -> None:
    """cuDNN's kernels are; other code in the process of the engine keeps them."""
    llm = LLM(tiny_model("llama"), device="cpu", max_model_len=64)
    seen = []
    llm.core.runner._hf_model.model.get_decoder().register_forward_pre_hook(
        lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    llm.generate("hello", SamplingParams(max_tokens=3), use_tqdm=False)
    assert seen
    assert not any(seen)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_the_last_of_several_steps_enables_the_kernels_again() -> None:
    """Two engines in one process may be in a step at the same time, and end in any order."""
    first, second = use_ready_kernels(), use_ready_kernels()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.cuda.cudnn_sdp_enabled()
