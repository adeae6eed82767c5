"""The plan counts what it says, and what doesn't fit is refused with its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    CLIPVisionConfig,
    Gemma3Config,
    LlamaConfig,
    LlavaConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    SiglipVisionConfig,
)

from sensorium.core.admission import Limits
from sensorium.engine.assembly import memory as memory_module
from sensorium.engine.assembly.memory import (
    MemoryPlan,
    check_memory,
    format_bytes,
    get_free_bytes,
    get_num_kv_bytes_per_token,
    plan_memory,
)
from sensorium.engine.assembly.options import EngineOptions
from sensorium.types.errors import ModelError
from sensorium.types.model_kind import CAUSAL

CPU = torch.device("cpu")
LIMITS = Limits(
    max_model_len=100,
    max_num_batched_tokens=50,
    max_num_seqs=2,
    encoder_cache_size=30,
    max_num_encoder_embeds=10,
)
TEXT = LlamaConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
GIB = 2**30
# One of each way of writing a config.
_COMMON = (
    "gemma3n",
    "gemma4",
    "gpt2",
    "internvl",
    "llama4",
    "mamba",
    "mllama",
    "qwen3_moe",
    "qwen3_vl",
)
PLAN = MemoryPlan(
    weights_bytes=8 * GIB,
    kv_cache_bytes=GIB,
    encoder_cache_bytes=GIB // 2,
    encoder_peak_bytes=GIB // 4,
    step_bytes=GIB // 4,
)


def plan(config: PretrainedConfig, kv_cache_bytes: int | None = None) -> MemoryPlan:
    return plan_memory(
        config,
        EngineOptions(max_model_len=100, kv_cache_memory_bytes=kv_cache_bytes),
        kind=CAUSAL,
        limits=LIMITS,
        weights_bytes=12_345,
        element_size=2,
        device=CPU,
    )


def test_a_model_for_text_needs_weights_keys_values_and_a_step() -> None:
    planned = plan(TEXT)
    assert planned.weights_bytes == 12_345
    assert planned.kv_cache_bytes == 100 * (2 * 3 * 2 * 16) * 2
    assert (planned.encoder_cache_bytes, planned.encoder_peak_bytes) == (0, 0)
    assert planned.step_bytes == 50 * (6 * 64 + 3 * 96) * 2 + 2 * 1000 * 24
    assert planned.total_bytes == sum(
        (planned.weights_bytes, planned.kv_cache_bytes, planned.reserve_bytes)
    )


def test_graphs_of_encoders_are_planned_only_where_they_are_captured() -> None:
    config = LlavaConfig(text_config=TEXT)
    cuda = torch.device("cuda")  # only its name is used

    def plan_graphs(*, captures_encoders: bool) -> MemoryPlan:
        return plan_memory(
            config,
            EngineOptions(max_model_len=100),
            kind=CAUSAL,
            limits=LIMITS,
            weights_bytes=1,
            element_size=2,
            device=cuda,
            captures_encoders=captures_encoders,
        )

    without, planned = (plan_graphs(captures_encoders=value) for value in (False, True))
    assert without.encoder_graph_bytes == 0
    assert 0 < planned.encoder_graph_bytes <= planned.encoder_peak_bytes
    assert planned.reserve_bytes == without.reserve_bytes + planned.encoder_graph_bytes


def test_a_cache_that_was_asked_for_is_what_is_planned() -> None:
    assert plan(TEXT, kv_cache_bytes=777).kv_cache_bytes == 777


def test_heads_may_be_wider_than_their_share_of_the_model() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, head_dim=32)
    assert get_num_kv_bytes_per_token(config, 4) == 2 * 4 * 32 * 4


def test_configs_of_all_kinds_have_a_plan() -> None:
    """Configs are written by many hands: none may end in an exception of its own."""
    planned = {name: plan(CONFIG_MAPPING[name]()) for name in _COMMON}
    assert all(entry.step_bytes > 0 for entry in planned.values())
    assert planned["gemma4"].kv_cache_bytes > 0  # its layers differ in the width of their heads
    assert planned["mamba"].kv_cache_bytes == 0
    assert all(planned[name].encoder_peak_bytes > 0 for name in ("qwen3_vl", "internvl", "gemma3n"))


def test_encoders_count_with_the_patches_of_an_embedding() -> None:
    llava = LlavaConfig(
        text_config=TEXT, vision_config=CLIPVisionConfig(num_hidden_layers=5, **SIZES)
    )
    planned = plan(llava)
    assert planned.encoder_cache_bytes == 30 * 64 * 2
    # LLaVA chooses among the outputs of all layers.
    assert planned.encoder_peak_bytes == 10 * ((6 + 5) * 32 + 3 * 48) * 2
    gemma = Gemma3Config(
        text_config={"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000},
        vision_config=SiglipVisionConfig(**SIZES),
        mm_tokens_per_image=4,
    )
    assert plan(gemma).encoder_peak_bytes == 10 * (16 // 4) * (6 * 32 + 3 * 48) * 2
    qwen = Qwen2_5_VLConfig(
        text_config={"hidden_size": 64, "num_attention_heads": 4},
        vision_config={"hidden_size": 32, "intermediate_size": 48, "spatial_merge_size": 3},
    )
    assert plan(qwen).encoder_peak_bytes == 10 * 9 * (6 * 32 + 3 * 48) * 2


def test_what_fits_to_the_byte_is_accepted_and_one_more_refused_with_all_figures() -> None:
    check_memory(PLAN, free_bytes=10 * GIB, device=CPU)
    with pytest.raises(ModelError) as caught:
        check_memory(PLAN, free_bytes=10 * GIB - 1, device=CPU)
    message = str(caught.value)
    assert (
        "does not fit on cpu: weights 8.0 GiB + KV cache 1.0 GiB + encoder outputs 512.0 MiB "
        "+ encoders at work 256.0 MiB + a step's tensors 256.0 MiB = 10.0 GiB" in message
    )
    assert "10.0 GiB are free" in message
    assert "max_model_len" in message
    assert "gpu_memory_utilization" not in message


def test_the_advice_names_the_option_at_fault() -> None:
    with pytest.raises(ModelError, match=r"a smaller model, .*gpu_memory_utilization"):
        check_memory(PLAN, free_bytes=GIB, device=torch.device("cuda"))
    small = replace(PLAN, weights_bytes=1)
    with pytest.raises(ModelError, match="a smaller max_model_len"):
        check_memory(small, free_bytes=GIB, device=CPU)


def test_a_share_of_a_cuda_device_stays_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60, 100))
    assert get_free_bytes(cuda, 0.75) == 35
    assert get_free_bytes(cuda, 1.0) == 60
    assert get_free_bytes(cuda, 0.25) == 0
    monkeypatch.setattr(memory_module, "get_free_system_bytes", lambda: 7)
    assert get_free_bytes(CPU, 0.5) == 7


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 * GIB // 2, "1.5 GiB")],
)
def test_bytes_are_formatted_with_a_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
