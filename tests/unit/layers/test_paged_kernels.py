"""FlashInfer and `varlen_attn` are called with the right step.

On a CPU stand-ins do what their documentation says. `tests/gpu` asks whether the real kernels do.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sensorium.layers.attention import flashinfer_backend, varlen_backend
from sensorium.layers.attention.backend import PagedAttention

from .paged_step import Chunk, Shape, attend_densely
from .steps import CHECKS, Setting

SHAPE = Shape(num_heads=4, num_kv_heads=2, key_dim=8, value_dim=8, block_size=16)
PLANS: list[dict[str, Any]] = []  # every plan since a test began


def attend_row(
    query: torch.Tensor,  # [n, H, D]
    cache: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    seq_len: int,
    window_left: int,
    scaling: float | None,
) -> torch.Tensor:
    """The last n of `seq_len` positions, causal, seeing `window_left` positions before each."""
    key, value = (pool[pages.long()].flatten(0, 1)[:seq_len] for pool in cache)
    queries = torch.arange(seq_len - len(query), seq_len)[:, None]
    keys = torch.arange(seq_len)
    mask = keys <= queries
    if window_left >= 0:
        mask &= keys >= queries - window_left
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_densely(query, key, value, mask, scale)


class FakeWrapper:
    def __init__(self, workspace: torch.Tensor, kv_layout: str, *, backend: str) -> None:
        assert (kv_layout, backend) == ("NHD", "fa2")
        self.device = workspace.device

    def plan(
        self,
        query_starts: torch.Tensor,
        page_starts: torch.Tensor,
        page_ids: torch.Tensor,
        last_page_lens: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        **options: Any,
    ) -> None:
        assert causal
        for tensor in (query_starts, page_starts, page_ids, last_page_lens):
            assert tensor.dtype == torch.int32
        assert len(page_ids) == page_starts[-1]
        assert options["max_token_per_sequence"] == int(query_starts.diff().max())
        seq_lens = (page_starts.diff() - 1) * page_size + last_page_lens
        self.shape = (num_heads, num_kv_heads, head_dim)
        self.plan_values = options | {
            "queries": query_starts.tolist(),
            "pages": page_ids.tensor_split(page_starts[1:-1].tolist()),
            "seq_lens": seq_lens.tolist(),
        }
        PLANS.append(self.plan_values)

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert query.is_contiguous()
        assert (query.shape[1], *cache[0].shape[2:]) == self.shape
        plan = self.plan_values
        assert plan["q_data_type"] == plan["kv_data_type"] == query.dtype
        starts = plan["queries"]
        rows = [
            attend_row(query[a:b], cache, pages, seq_len, plan["window_left"], plan["sm_scale"])
            for a, b, pages, seq_len in zip(
                starts, starts[1:], plan["pages"], plan["seq_lens"], strict=False
            )
        ]
        return torch.cat(rows)


def fake_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    assert cu_seq_k is None
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert {cu_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(seqused_k.max()))
    starts = cu_seq_q.tolist()
    rows = [
        attend_row(query[a:b], (key, value), pages, seq_len, window_size[0], scale)
        for a, b, pages, seq_len in zip(
            starts, starts[1:], block_table, seqused_k.tolist(), strict=False
        )
    ]
    return torch.cat(rows)


def make_flashinfer(monkeypatch: pytest.MonkeyPatch) -> PagedAttention:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = FakeWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    event = SimpleNamespace(synchronize=lambda: None, record=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(
        flashinfer_backend, "_pin", lambda values: torch.from_numpy(values.astype(np.int32))
    )
    monkeypatch.setattr(flashinfer_backend, "_WORKSPACE_BYTES", 1)
    return flashinfer_backend.FlashInferAttention(
        block_size=SHAPE.block_size, dtype=torch.float32, device=torch.device("cpu")
    )


def make_varlen(monkeypatch: pytest.MonkeyPatch) -> PagedAttention:
    monkeypatch.setattr(varlen_backend, "_find_function", lambda: fake_varlen_attn)
    monkeypatch.setattr(varlen_backend, "_activate_kernels", lambda: None)
    return varlen_backend.VarlenAttention(
        block_size=SHAPE.block_size, dtype=torch.float32, device=torch.device("cpu")
    )


MAKERS = {"flashinfer": make_flashinfer, "varlen": make_varlen}


@pytest.mark.parametrize("step", CHECKS)
@pytest.mark.parametrize("name", MAKERS)
def test_kernels_that_support_a_step_compute_it(
    monkeypatch: pytest.MonkeyPatch, name: str, step: str
) -> None:
    CHECKS[step](Setting(backend=MAKERS[name](monkeypatch)), SHAPE)


def test_one_plan_a_step_serves_all_layers_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_flashinfer(monkeypatch)
    chunks = [Chunk(start=4, end=5), Chunk(start=0, end=20)]
    step = Setting(backend=backend).make_step(SHAPE, chunks, (None, 5))
    PLANS.clear()
    for _ in range(2):
        step.run()
        for cache in step.caches:  # more layers of the same two groups
            step.attend(cache)
    assert [plan["window_left"] for plan in PLANS] == [-1, 4, -1, 4]
    step.scaling = 1.0
    step.attend(step.caches[0])
    assert [plan["sm_scale"] for plan in PLANS] == [0.37] * 4 + [1.0]


def test_a_step_with_spans_has_no_kernel_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_flashinfer(monkeypatch)
    PLANS.clear()
    chunks = [Chunk(start=0, end=20, spans=((3, 9),))]
    Setting(backend=backend).make_step(SHAPE, chunks).check()
    assert PLANS == []
    Setting(backend=backend).make_step(SHAPE, [Chunk(start=0, end=20)]).check()
    assert len(PLANS) == 1


def test_this_torch_says_whether_it_reads_pages() -> None:
    cuda = torch.device("cuda")
    obstacle = varlen_backend.VarlenAttention.find_obstacle([], torch.bfloat16, cuda)
    assert obstacle is None or "block_table" in obstacle or "FlashAttention-3" in obstacle
