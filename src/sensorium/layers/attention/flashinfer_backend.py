"""Computes paged attention with FlashInfer's FA2 kernels, which read pages in place.

There is one FlashInfer wrapper for each kind of layer. It is planned once per step, when the first
layer of its kind attends, because heads, sizes and scaling are known only then. A plan prepares the
step's kernel launches, from host arrays, so that nothing is read back from the device. Decoding
requests are prefills of one token. FA2 is used and not FA3: it compiles in a third of the time,
once per machine, and supports all head sizes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sensorium.layers.attention.backend import LayerCache, StepLayout, find_common_obstacle
from sensorium.layers.attention.torch_backend import InPlaceAttention
from sensorium.layers.kv_layout import LayerSpec
from sensorium.utils.arrays import to_device
from sensorium.utils.process import long_work

_HEAD_DIMS = (64, 128, 256, 512)
# The workspace holds partial results of split sequences: heads / key heads × 264 tiles × 128
# queries × head size × 4 bytes. That is 139 MB for 8 heads per key head and a head size of 128 on
# 132 multiprocessors. vLLM reserves 394 MiB as well.
_WORKSPACE_BYTES = 394 << 20


class _Kind(NamedTuple):
    """The properties that layers must have in common to share one FlashInfer plan."""

    group_index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepPages:
    """The layout of a step as int32 tensors in the form that FlashInfer needs.

    A page is a block of the KV cache. All tensors except the page ids are in pinned host memory.
    """

    query_starts: torch.Tensor  # [B + 1]
    page_starts: torch.Tensor  # [B + 1]
    last_page_lens: torch.Tensor  # [B]
    page_ids: tuple[torch.Tensor, ...]  # per group, on the device: [pages of all requests]


class _Wrapper:
    """A FlashInfer wrapper (the object that launches its kernels), and its last planned step."""

    def __init__(self, workspace: torch.Tensor) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.kernel: Any = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self.pages: _StepPages | None = None  # the step of the last plan
        # Recorded behind each plan: when it is reached, the plan has been copied from the wrapper's
        # pinned memory, which may be written again.
        self._copied = torch.cuda.Event()

    def plan(self, pages: _StepPages, *arguments: Any, **options: Any) -> None:
        # The last copy may not be done: in steps that sample nothing, the host runs ahead.
        self._copied.synchronize()
        # The first plan of a kind compiles its kernels if the trial at the start did not.
        with long_work() if self.pages is None else nullcontext():
            self.kernel.plan(*arguments, **options)
        self._copied.record(torch.cuda.current_stream(self.kernel.device))
        self.pages = pages


class FlashInferAttention(InPlaceAttention):
    name = "flashinfer"
    _pages: _StepPages

    def __init__(self, *, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(block_size=block_size, dtype=dtype)
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Kind, _Wrapper] = {}

    @staticmethod
    def find_obstacle(
        layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Return why FlashInfer can't compute these layers on the device, or None if it can."""
        if (obstacle := find_common_obstacle(layers, dtype, device)) is not None:
            return obstacle
        for layer in layers:
            if layer.key_dim not in _HEAD_DIMS:
                return f"head sizes may be {', '.join(map(str, _HEAD_DIMS))}, not {layer.key_dim}"
        is_installed = importlib.util.find_spec("flashinfer") is not None
        return None if is_installed else "flashinfer is not installed"

    def _prepare_pages(self, layout: StepLayout) -> None:
        self._pages = _make_pages(layout, self._block_size)

    def _attend_pages(
        self, layout: StepLayout, cache: LayerCache, queries: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        num_kv_heads, head_dim = cache.keys.shape[2:]
        kind = _Kind(cache.group_index, queries.shape[1], num_kv_heads, head_dim, scaling)
        if (wrapper := self._wrappers.get(kind)) is None:
            wrapper = self._wrappers[kind] = _Wrapper(self._workspace)
        pages = self._pages
        if wrapper.pages is not pages:
            window = layout.groups[cache.group_index].window
            wrapper.plan(
                pages,
                pages.query_starts,
                pages.page_starts,
                pages.page_ids[cache.group_index],
                pages.last_page_lens,
                *(kind.num_heads, num_kv_heads, head_dim, self._block_size),
                causal=True,
                sm_scale=scaling,
                window_left=-1 if window is None else window - 1,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                max_token_per_sequence=max(layout.query_lens),
            )
        output: torch.Tensor = wrapper.kernel.run(queries, (cache.keys, cache.values))
        return output


def _make_pages(layout: StepLayout, block_size: int) -> _StepPages:
    seq_lens = np.array(layout.seq_lens)
    num_pages = -(-seq_lens // block_size)
    page_starts = np.concatenate([[0], np.cumsum(num_pages)])
    columns = np.arange(page_starts[-1]) - np.repeat(page_starts[:-1], num_pages)
    rows = np.repeat(np.arange(len(seq_lens)), num_pages)
    page_ids = []
    for group in layout.groups:
        tables = group.block_tables
        places = torch.from_numpy(rows * tables.shape[1] + columns)
        flat = tables.flatten().index_select(0, to_device(places, tables.device))
        page_ids.append(flat.to(torch.int32))
    return _StepPages(
        query_starts=_pin(np.concatenate([[0], np.cumsum(layout.query_lens)])),
        page_starts=_pin(page_starts),
        last_page_lens=_pin(seq_lens - (num_pages - 1) * block_size),
        page_ids=tuple(page_ids),
    )


def _pin(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).pin_memory()
