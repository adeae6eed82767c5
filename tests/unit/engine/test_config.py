"""What the user said becomes complete, or is refused with the option's name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sensorium.engine.assembly.config import (
    EngineConfig,
    EngineOptions,
    resolve_config,
    resolve_limits,
)
from sensorium.engine.assembly.memory import MemoryPlan
from sensorium.layers.kv_layout import LayerGroup, LayerSpec, group_layers
from sensorium.types.errors import ModelError
from sensorium.types.model_kind import CAUSAL, NO_DECODER

BYTES_PER_BLOCK = 2 * (8 + 8) * 16 * 4  # one layer, float32, blocks of 16
OPTIONS = EngineOptions(kv_cache_memory_bytes=1000 * BYTES_PER_BLOCK)

MEMORY = MemoryPlan(
    weights_bytes=70_000,
    kv_cache_bytes=5,
    encoder_cache_bytes=4000,
    encoder_peak_bytes=300,
    step_bytes=20,
)


def make_groups(*windows: int | None) -> tuple[LayerGroup, ...]:
    return group_layers(
        [
            LayerSpec(
                layer_index=i, num_kv_heads=2, key_dim=8, value_dim=8, window=window, source=i
            )
            for i, window in enumerate(windows)
        ]
    )


@pytest.mark.parametrize("odd", [0, -5, True, "7", 7.5])
def test_a_context_that_is_no_length_is_not_known(odd: Any) -> None:
    with pytest.raises(ModelError, match="has no context length: set max_model_len"):
        resolve(OPTIONS, context=odd)
    assert resolve(replace(OPTIONS, max_model_len=32), context=odd).limits.max_model_len == 32


def resolve(
    options: EngineOptions, *windows: int | None, context: int | None = 4096, **changes: Any
) -> EngineConfig:
    text_config = (
        SimpleNamespace(architectures=None)
        if context is None
        else SimpleNamespace(architectures=None, max_position_embeddings=context)
    )
    device = torch.device(changes.get("device", "cpu"))
    return resolve_config(
        options,
        limits=resolve_limits(options, text_config=text_config, kind=CAUSAL, device=device),  # type: ignore[arg-type]
        layer_groups=make_groups(*(windows or (None,))),
        element_size=4,
        device=device,
        attention_backend="torch",
        memory=MEMORY,
        free_bytes=changes.get("free_bytes", 2**30),
    )


def test_defaults_fit_the_model_and_a_cpu() -> None:
    config = resolve(OPTIONS)
    assert config.limits.max_model_len == 4096
    assert config.limits.max_num_seqs == 32
    assert config.limits.max_num_batched_tokens == 512
    assert config.limits.long_prefill_token_threshold == 512
    assert config.limits.long_prefill_pause == 64
    assert config.limits.max_num_encoder_embeds == 2048
    assert config.limits.encoder_cache_size == 16_384
    assert config.block_size == 16
    assert config.enable_prefix_caching
    assert config.scheduling_policy == "fcfs"
    assert config.groups[0].num_blocks == 1000


def test_what_the_user_says_is_what_is_used() -> None:
    options = replace(
        OPTIONS,
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        encoder_cache_size=50,
        max_num_encoder_embeds=40,
        block_size=8,
        enable_prefix_caching=False,
        disable_chunked_mm_input=True,
        scheduling_policy="priority",
    )
    config = resolve(options)
    limits = config.limits
    assert (limits.max_model_len, limits.max_num_seqs) == (100, 3)
    assert (limits.max_num_batched_tokens, limits.max_num_encoder_embeds) == (64, 40)
    assert limits.encoder_cache_size == 50
    assert limits.disable_chunked_mm_input
    assert (config.block_size, config.enable_prefix_caching) == (8, False)
    assert config.scheduling_policy == "priority"
    assert config.groups[0].num_blocks == 2000


@pytest.mark.parametrize(
    "name",
    [
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "encoder_cache_size",
        "max_num_encoder_embeds",
        "block_size",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8"])
def test_a_size_that_is_no_count_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"{name} must be an integer >= 1, not"):
        EngineOptions(**{name: value})


@pytest.mark.parametrize(("given", "budget", "expected"), [(0, 64, 0), (None, 64, 64), (99, 8, 99)])
def test_the_threshold_of_long_prompts_is_at_most_a_step_unless_it_is_given(
    given: int | None, budget: int, expected: int
) -> None:
    options = replace(OPTIONS, long_prefill_token_threshold=given, max_num_batched_tokens=budget)
    limits = resolve(options).limits
    assert limits.long_prefill_token_threshold == expected
    assert limits.long_prefill_pause == -(-expected // 8)


def test_a_gpu_computes_long_prompts_in_larger_pieces_without_a_pause() -> None:
    limits = resolve_limits(
        OPTIONS,
        text_config=SimpleNamespace(architectures=None, max_position_embeddings=4096),  # type: ignore[arg-type]
        kind=CAUSAL,
        device=torch.device("cuda"),
    )
    assert limits.max_num_batched_tokens == limits.max_num_encoder_embeds == 8192
    assert (limits.long_prefill_token_threshold, limits.long_prefill_pause) == (2048, 0)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="scheduling_policy must be fcfs or priority, not 'lifo'"):
        EngineOptions(scheduling_policy="lifo")


@pytest.mark.parametrize("given", ["None", "generation_config.json", None, 1])
def test_generation_config_is_auto_or_none(given: Any) -> None:
    with pytest.raises(ModelError, match="generation_config must be auto or none"):
        EngineOptions(generation_config=given)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"images": 4}, "limit_mm_per_prompt.*'images'.*image, video, audio"),
        ({"image": -1}, "limit_mm_per_prompt.*image.*>= 0, not -1"),
        ({"image": "4"}, "limit_mm_per_prompt.*image.*>= 0, not '4'"),
    ],
)
def test_a_limit_that_would_limit_nothing_is_refused(limits: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        EngineOptions(limit_mm_per_prompt=limits)


def test_a_context_beyond_the_models_is_refused_with_both() -> None:
    with pytest.raises(ModelError, match=r"max_model_len=5000 is more than the model's .* 4096"):
        resolve(replace(OPTIONS, max_model_len=5000))


def test_a_model_that_names_no_context_needs_one() -> None:
    with pytest.raises(ModelError, match="set max_model_len"):
        resolve(OPTIONS, context=None)
    options = replace(OPTIONS, max_model_len=64)
    assert resolve(options, context=None).limits.max_model_len == 64


def test_a_ctc_transducer_model_has_a_short_context_and_room_for_many_frames() -> None:
    config: Any = SimpleNamespace(max_position_embeddings=5000)
    resolve = partial(
        resolve_limits, text_config=config, kind=NO_DECODER, device=torch.device("cpu")
    )
    limits = resolve(EngineOptions())
    assert (limits.max_model_len, limits.encoder_cache_size) == (2, 2**20)
    smaller = resolve(EngineOptions(encoder_cache_size=99))
    assert smaller.encoder_cache_size == 99
    with pytest.raises(ModelError, match="more than the model's context of 2 tokens"):
        resolve(EngineOptions(max_model_len=64))


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused() -> None:
    options = EngineOptions(kv_cache_memory_bytes=10 * BYTES_PER_BLOCK, max_model_len=145)
    with pytest.raises(ModelError, match=r"max_model_len=145 does not fit.* 144 tokens"):
        resolve(options)
    assert resolve(replace(options, max_model_len=144)).limits.max_model_len == 144


def test_a_default_context_is_cut_to_what_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = resolve(EngineOptions(kv_cache_memory_bytes=10 * BYTES_PER_BLOCK))
    assert config.limits.max_model_len == 144
    assert "cut to 144 tokens" in caplog.text


def test_only_groups_that_keep_everything_bound_the_context() -> None:
    config = resolve(
        replace(OPTIONS, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64), None, 8
    )
    full, windowed = config.groups
    assert windowed.window == 8
    # One window, begun and ended inside a block, and a step of a whole context; and a null block.
    assert windowed.num_blocks == -(-(8 + 2 * 16 + 64) // 16) + 1
    assert full.num_blocks == 2000 // 2 - windowed.num_blocks


@pytest.mark.parametrize("share", [0, -0.5, 1.5, "0.9", True, float("nan")])
def test_an_invalid_share_of_memory_is_refused(share: Any) -> None:
    with pytest.raises(
        ModelError, match="gpu_memory_utilization must be a number above 0 and at most 1"
    ):
        EngineOptions(gpu_memory_utilization=share)


@pytest.mark.parametrize(
    ("device", "num_free_blocks", "expected"),
    [
        ("cpu", 10_000, 2 * 64 // 16 + 1),  # all requests at full length
        ("cpu", 4 * 6, 6),  # a quarter of what is free
        ("cuda", 6, 6),  # all that is free
    ],
)
def test_memory_is_chosen_for_all_requests_at_full_length_but_not_beyond_a_share_of_it(
    device: str, num_free_blocks: int, expected: int
) -> None:
    options = EngineOptions(max_num_seqs=2, max_model_len=64)
    free_bytes = MEMORY.reserve_bytes + num_free_blocks * BYTES_PER_BLOCK
    config = resolve(options, device=device, free_bytes=free_bytes)
    assert config.groups[0].num_blocks == expected
    assert config.memory == replace(MEMORY, kv_cache_bytes=expected * BYTES_PER_BLOCK)


def test_a_cache_that_was_asked_for_leaves_the_rest_its_room() -> None:
    free_bytes = MEMORY.reserve_bytes + 1000 * BYTES_PER_BLOCK
    assert resolve(OPTIONS, free_bytes=free_bytes).groups[0].num_blocks == 1000
    with pytest.raises(
        ModelError, match=r"kv_cache_memory_bytes=\d+ .* is more than .* free on cpu"
    ):
        resolve(OPTIONS, free_bytes=free_bytes - 1)


@pytest.mark.parametrize("sizes", [5, "1,2", (), [0], [1, True], [1.0]])
def test_graph_sizes_are_a_list_of_counts(sizes: Any) -> None:
    with pytest.raises(ModelError, match="cuda_graph_sizes must be a list of integers >= 1, not"):
        EngineOptions(cuda_graph_sizes=sizes)
