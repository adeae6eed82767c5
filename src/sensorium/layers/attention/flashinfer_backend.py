"""Computes paged attention with FlashInfer's FA2 kernels, which read pages in place.

There is one wrapper for each kind of layer. It is planned once per step, when the first layer of
its kind attends, because heads, sizes and scaling are known only then. Plans are made from host
arrays, so that nothing is read back from the device. Decoding requests are treated as prefills of
one token. A step that has spans with attention in both directions uses the gather of
`torch_backend` for all its tokens.

FA2 is used and not FA3: it compiles in a third of the time, once per machine, and supports all head
sizes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sensorium.layers.attention.backend import LayerCache, StepLayout, store_new_tokens
from sensorium.layers.attention.torch_backend import TorchPagedAttention
from sensorium.layers.kv_layout import LayerSpec
from sensorium.types.errors import InvariantError
from sensorium.utils.arrays import to_device
from sensorium.utils.process import long_work

HEAD_DIMS = (64, 128, 256, 512)
# The workspace holds partial results of split sequences: heads / key heads × 264 tiles × 128
# queries × head size × 4 bytes. That is 139 MB for 8 heads per key head and a head size of 128 on
# 132 multiprocessors. vLLM reserves 394 MiB as well.
_WORKSPACE_BYTES = 394 << 20


def find_obstacle(
    layers: Sequence[LayerSpec], *, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why these layers can't be computed here, or `None` if they can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels take float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    for layer in layers:
        if layer.key_dim != layer.value_dim:
            return f"keys of size {layer.key_dim} with values of size {layer.value_dim}"
        if layer.key_dim not in HEAD_DIMS:
            return f"its head sizes are {', '.join(map(str, HEAD_DIMS))}, not {layer.key_dim}"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The properties that layers must have in common to share a plan."""

    group_index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float | None


class _Wrapper:
    """A wrapper of FlashInfer, and the step that it is planned for."""

    def __init__(self, workspace: torch.Tensor) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.kernel: Any = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self.step_index: int | None = None
        # Recorded behind each plan: when it is reached, the plan has been copied from the wrapper's
        # pinned memory, which may be written again.
        self._copied = torch.cuda.Event()

    def plan(self, step_index: int, *arguments: Any, **options: Any) -> None:
        # The last copy may not be done: in steps that sample nothing, the host runs ahead.
        self._copied.synchronize()
        # The first plan of a kind compiles its kernels if the trial at the start did not.
        with long_work() if self.step_index is None else nullcontext():
            self.kernel.plan(*arguments, **options)
        self._copied.record(torch.cuda.current_stream(self.kernel.device))
        self.step_index = step_index


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepPages:
    """The layout of a step in the form of FlashInfer, as int32.

    All but the page ids are in pinned host memory.
    """

    query_starts: torch.Tensor  # [B + 1]
    page_starts: torch.Tensor  # [B + 1]
    last_page_lens: torch.Tensor  # [B]
    page_ids: tuple[torch.Tensor, ...]  # per group, on the device: [pages of all requests]


class FlashInferAttention:
    name = "flashinfer"

    def __init__(self, *, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size = block_size
        self._dtype = dtype
        self._gather = TorchPagedAttention(block_size=block_size, dtype=dtype)
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_Kind, _Wrapper] = {}
        self._step_index = 0
        self._layout: StepLayout | None = None
        self._pages: _StepPages | None = None

    def prepare(self, layout: StepLayout) -> None:
        self._step_index += 1
        self._layout = layout
        self._pages = None
        if layout.attend_until is None:
            self._pages = _make_pages(layout, self._block_size)
        else:
            self._gather.prepare(layout)

    def attend(
        self,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
    ) -> torch.Tensor:
        if self._layout is None:
            raise InvariantError("attend() before prepare()")
        if self._pages is None:
            return self._gather.attend(cache, query, key, value, scaling=scaling)
        if not cache.is_shared:
            group = self._layout.groups[cache.group_index]
            store_new_tokens(cache, group.slot_mapping, key, value)
        kind = _Kind(
            group_index=cache.group_index,
            num_heads=query.shape[1],
            num_kv_heads=cache.keys.shape[2],
            head_dim=cache.keys.shape[3],
            scaling=scaling,
        )
        kernel = self._get_planned(kind, self._layout, self._pages)
        queries = query[0].transpose(0, 1).contiguous()
        return kernel.run(queries, (cache.keys, cache.values))[None]

    def _get_planned(self, kind: _Kind, layout: StepLayout, pages: _StepPages) -> Any:
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            wrapper = self._wrappers[kind] = _Wrapper(self._workspace)
        if wrapper.step_index != self._step_index:
            window = layout.groups[kind.group_index].window
            wrapper.plan(
                self._step_index,
                pages.query_starts,
                pages.page_starts,
                pages.page_ids[kind.group_index],
                pages.last_page_lens,
                kind.num_heads,
                kind.num_kv_heads,
                kind.head_dim,
                self._block_size,
                causal=True,
                sm_scale=kind.scaling,
                window_left=-1 if window is None else window - 1,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                max_token_per_sequence=max(layout.query_lens),
            )
        return wrapper.kernel


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
