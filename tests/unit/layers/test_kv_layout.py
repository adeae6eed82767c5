"""How layers are grouped, and how memory is split among the groups."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.layers.kv_layout import LayerGroup, LayerSpec, group_layers, plan_kv_cache
from sensorium.types.errors import ModelError
from sensorium.types.scheduling import KVCacheGroup


def layer(index: int, *, window: int | None = None, source: int | None = None) -> LayerSpec:
    return LayerSpec(
        layer_index=index,
        num_kv_heads=2,
        key_dim=8,
        value_dim=4,
        window=window,
        source=index if source is None else source,
    )


def get_plan(
    groups: tuple[LayerGroup, ...], memory_bytes: int, max_tokens: int = 10**9
) -> tuple[KVCacheGroup, ...]:
    return plan_kv_cache(
        groups,
        memory_bytes=memory_bytes,
        block_size=16,
        element_size=4,
        max_tokens_per_window_group=max_tokens,
    )


def get_num_bytes(groups: tuple[LayerGroup, ...], plan: tuple[KVCacheGroup, ...]) -> int:
    return sum(
        group.num_bytes_per_block(block_size=16, element_size=4) * planned.num_blocks
        for group, planned in zip(groups, plan, strict=True)
    )


BYTES_PER_LAYER_BLOCK = 2 * (8 + 4) * 16 * 4


def test_layers_of_one_window_form_a_group_and_full_attention_comes_first() -> None:
    groups = group_layers(
        [layer(0, window=12), layer(1), layer(2, window=4), layer(3, window=12), layer(4)]
    )
    assert [group.window for group in groups] == [None, 4, 12]
    assert [[spec.layer_index for spec in group.layers] for group in groups] == [
        [1, 4],
        [2],
        [0, 3],
    ]


def test_a_sharing_layer_joins_its_source_and_costs_nothing() -> None:
    (group,) = group_layers([layer(0), layer(1, source=0)])
    assert len(group.layers) == 2
    assert group.num_bytes_per_block(block_size=16, element_size=4) == BYTES_PER_LAYER_BLOCK


def test_sharing_over_different_windows_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="layer 1 shares keys and values with layer 0"):
        group_layers([layer(0), layer(1, window=4, source=0)])


def test_all_memory_goes_to_a_single_group() -> None:
    groups = group_layers([layer(0), layer(1)])
    memory = 10 * 2 * BYTES_PER_LAYER_BLOCK
    assert get_plan(groups, memory) == (KVCacheGroup(num_blocks=10),)
    assert get_plan(groups, memory - 1) == (KVCacheGroup(num_blocks=9),)


def test_a_group_with_a_window_gets_its_bound_and_a_null_block_and_leaves_the_rest() -> None:
    groups = group_layers([layer(0), layer(1, window=8)])
    plan = get_plan(groups, 100 * BYTES_PER_LAYER_BLOCK, max_tokens=65)
    assert plan == (KVCacheGroup(num_blocks=94), KVCacheGroup(num_blocks=6, window=8))


def test_too_little_memory_is_refused_with_both_figures() -> None:
    groups = group_layers([layer(0), layer(1, window=8)])
    needed = 4 * BYTES_PER_LAYER_BLOCK  # a null block and one more, in each group
    get_plan(groups, needed)
    figures = f"at least {needed} bytes.*kv_cache_memory_bytes is {needed - 1}"
    with pytest.raises(ModelError, match=figures):
        get_plan(groups, needed - 1)


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 64)), min_size=1, max_size=6),
    num_memory_blocks=st.integers(0, 500),
    remainder=st.integers(0, BYTES_PER_LAYER_BLOCK - 1),
    max_tokens=st.integers(1, 2000),
)
@settings(deadline=None)
def test_a_plan_fits_the_memory_and_wastes_less_than_one_more_block_each(
    windows: list[int | None], num_memory_blocks: int, remainder: int, max_tokens: int
) -> None:
    groups = group_layers([layer(index, window=w) for index, w in enumerate(windows)])
    memory = num_memory_blocks * BYTES_PER_LAYER_BLOCK + remainder
    try:
        plan = get_plan(groups, memory, max_tokens)
    except ModelError as error:
        (needed,) = map(int, re.findall(r"at least (\d+)", str(error)))
        assert memory < needed
        return
    bound = -(-max_tokens // 16) + 1
    assert get_num_bytes(groups, plan) <= memory
    most = max(group.num_blocks for group in plan)
    for group in plan:
        limit = most if group.window is None else min(most, bound)
        assert 2 <= group.num_blocks == limit
    larger = tuple(
        KVCacheGroup(
            num_blocks=most + 1 if g.window is None else min(most + 1, bound), window=g.window
        )
        for g in plan
    )
    assert larger == plan or get_num_bytes(groups, larger) > memory
