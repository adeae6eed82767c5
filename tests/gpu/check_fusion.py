"""Joined weights take no memory of the KV cache, and kernels are ready at the start."""

from __future__ import annotations

import gc
import shutil
import tempfile
from pathlib import Path

import torch
import transformers

from sensorium import SamplingParams
from sensorium.models.hf_model import HfModel
from tests.support.engine import make_llm

from .setting import get_directory, need_cuda

_MOST = 1.05  # what torch may hold, against what tensors take


def check_compiled_kernels() -> str:
    """Steps of every mixture of prompts and requests that decode compile no kernel anew."""
    need_cuda()
    import triton

    from sensorium.layers.kernels import decoding, fused_layers

    kernels = [
        value
        for module in (decoding, fused_layers)
        for value in vars(module).values()
        if isinstance(value, triton.runtime.JITFunction)
    ]

    def count() -> int:
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    with tempfile.TemporaryDirectory() as directory:
        _make_grouped(Path(directory) / "model")
        llm = make_llm(
            f"{directory}/model",
            device="cuda",
            dtype="bfloat16",
            attention_backend="triton",
            max_num_seqs=40,
        )
    before, num_steps = count(), 0
    assert before, "no kernel was compiled at the start, so nothing is counted"
    for index in range(80):
        tokens = [3 + (7 * index + i) % 90 for i in range(1 + 13 * index % 71)]
        llm._add({"prompt_token_ids": tokens}, SamplingParams(max_tokens=40, ignore_eos=True))
        llm.core.step()
        num_steps += 1
    after = count()
    assert after == before, f"{after - before} kernels were compiled in {num_steps} steps"
    return f"{before} kernels at the start; none were added in {num_steps} steps"


def _make_grouped(directory: Path) -> None:
    """Make a model with four query heads for each key head, which the trial of kernels has not."""
    shutil.copytree(get_directory("llama"), directory)
    config = transformers.AutoConfig.from_pretrained(directory)
    config.head_dim, config.num_attention_heads, config.num_key_value_heads = 64, 8, 2
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def check_fused_memory() -> str:
    need_cuda()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=1000,
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    weights = torch.cuda.memory_allocated() - before
    hf_model = HfModel(model.eval())
    hf_model.fuse()
    assert hf_model.fusion.counts["joined products"] == 2 * config.num_hidden_layers
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert allocated - before <= _MOST * weights, f"{allocated - before} of {weights} bytes"
    assert reserved <= _MOST * allocated, f"{reserved} bytes are held for {allocated}"
    return f"weights {weights >> 20} MiB; {reserved >> 20} MiB are held for {allocated >> 20} MiB"
