"""Joined weights take no memory that the KV cache could have."""

from __future__ import annotations

import gc

import torch
import transformers

from sensorium.models.adapter import ModelAdapter

from .setting import UnavailableError, get_device

_MOST = 1.05  # what torch may hold, against what tensors take


def check_fused_memory() -> str:
    if get_device() != "cuda":
        raise UnavailableError("needs a CUDA device")
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
    adapter = ModelAdapter(model.eval())
    adapter.fuse()
    assert adapter.fusion.counts["joined products"] == 2 * config.num_hidden_layers
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert allocated - before <= _MOST * weights, f"{allocated - before} of {weights} bytes"
    assert reserved <= _MOST * allocated, f"{reserved} bytes are held for {allocated}"
    return f"weights {weights >> 20} MiB; {reserved >> 20} MiB are held for {allocated >> 20} MiB"
