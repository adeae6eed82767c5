"""One step of paged attention built from plain sequences, and the dense attention it must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sensorium.layers.attention.backend import GroupTables, LayerCache, PagedAttention, StepLayout
from sensorium.layers.attention.torch_backend import TorchPagedAttention

NULL_BLOCK = 0
# Absolute and relative. In half precision kernels round probabilities, and outputs are sums of
# values up to about 4: four units in the last place of 1, and of the output itself.
TOLERANCES = {
    torch.float32: (2e-5, 1e-4),
    torch.float16: (4 * 2**-10, 4 * 2**-10),
    torch.bfloat16: (4 * 2**-7, 4 * 2**-7),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    block_size: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tokens `[start, end)` of a sequence; `spans` are seen in both directions."""

    start: int
    end: int
    spans: tuple[tuple[int, int], ...] = ()

    def get_attend_until(self, position: int) -> int:
        ends = [end for start, end in self.spans if start <= position < end]
        return ends[0] if ends else position + 1


def attend_densely(
    query: torch.Tensor,  # [n, H, D]
    key: torch.Tensor,  # [S, K, D]
    value: torch.Tensor,
    mask: torch.Tensor,  # bool [n, S]
    scaling: float,
) -> torch.Tensor:
    """Softmax attention as in a textbook, in float64: [n, H, D of values]."""
    repeats = query.shape[1] // key.shape[1]
    key = key.double().repeat_interleave(repeats, dim=1)
    value = value.double().repeat_interleave(repeats, dim=1)
    scores = torch.einsum("nhd,shd->hns", query.double(), key) * scaling
    probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hns,shd->nhd", probs, value).to(query.dtype)


class PagedStep:
    """A step in which every position before a chunk lies in the cache already.

    The blocks lie at random places; all other slots hold large garbage. A group with a window has
    lost the blocks that it has passed.
    """

    def __init__(
        self,
        shape: Shape,
        chunks: Sequence[Chunk],
        *,
        windows: Sequence[int | None] = (None,),
        seed: int = 0,
        backend: PagedAttention | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        has_causal_full_layers: bool = False,
    ) -> None:
        self.has_causal_full_layers = has_causal_full_layers
        self.dtype = dtype
        self.device = device
        self.shape = shape
        self.chunks = sorted(chunks, key=lambda chunk: chunk.end - chunk.start > 1)
        self.windows = tuple(windows)
        self.scaling = 0.37  # not the default of 1/sqrt(D): it must be passed on
        self._random = torch.Generator().manual_seed(seed)
        shapes = (
            (shape.num_heads, shape.key_dim),
            (shape.num_kv_heads, shape.key_dim),
            (shape.num_kv_heads, shape.value_dim),
        )
        self.sequences = [
            tuple(self._randn(chunk.end, *shape) for shape in shapes) for chunk in self.chunks
        ]
        self.tables = [self._make_tables(window) for window in self.windows]
        self.caches = [self._make_cache(index) for index in range(len(self.windows))]
        self.backend = backend or TorchPagedAttention(block_size=shape.block_size, dtype=dtype)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random).to(self.dtype)

    @property
    def num_blocks(self) -> int:
        return 4 + sum(-(-chunk.end // self.shape.block_size) for chunk in self.chunks)

    def _make_tables(self, window: int | None) -> list[list[int]]:
        free = (torch.randperm(self.num_blocks - 1, generator=self._random) + 1).tolist()
        tables = []
        for chunk in self.chunks:
            table = [free.pop() for _ in range(-(-chunk.end // self.shape.block_size))]
            if window is not None:
                num_passed = max(0, chunk.start - window + 1) // self.shape.block_size
                table[:num_passed] = [NULL_BLOCK] * num_passed
            tables.append(table)
        return tables

    def _make_cache(self, group_index: int) -> LayerCache:
        shape = self.shape
        size = (self.num_blocks, shape.block_size, shape.num_kv_heads)
        cache = LayerCache(
            keys=self._randn(*size, shape.key_dim) * 100,
            values=self._randn(*size, shape.value_dim) * 100,
            group_index=group_index,
            is_shared=False,
        )
        for row, chunk in enumerate(self.chunks):
            slots = self.get_slots(group_index, row, 0, chunk.start)
            is_live = slots >= shape.block_size  # not in the null block
            _, keys, values = self.sequences[row]
            cache.keys.flatten(0, 1)[slots[is_live]] = keys[: chunk.start][is_live]
            cache.values.flatten(0, 1)[slots[is_live]] = values[: chunk.start][is_live]
        return replace(cache, keys=cache.keys.to(self.device), values=cache.values.to(self.device))

    def get_slots(self, group_index: int, row: int, start: int, end: int) -> torch.Tensor:
        positions = torch.arange(start, end)
        table = torch.tensor(self.tables[group_index][row])
        size = self.shape.block_size
        return table[positions // size] * size + positions % size

    @property
    def layout(self) -> StepLayout:
        until = None
        if any(chunk.spans for chunk in self.chunks):
            until = torch.tensor(
                [c.get_attend_until(p) for c in self.chunks for p in range(c.start, c.end)],
                device=self.device,
            )
        return StepLayout(
            query_lens=tuple(chunk.end - chunk.start for chunk in self.chunks),
            seq_lens=tuple(chunk.end for chunk in self.chunks),
            groups=tuple(map(self._make_group, range(len(self.windows)))),
            attend_until=until,
        )

    def _make_group(self, index: int) -> GroupTables:
        tables = self.tables[index]
        width = max(map(len, tables))
        slots = [self.get_slots(index, r, c.start, c.end) for r, c in enumerate(self.chunks)]
        return GroupTables(
            window=self.windows[index],
            slot_mapping=torch.cat(slots).to(self.device),
            block_tables=torch.tensor(
                [t + [NULL_BLOCK] * (width - len(t)) for t in tables], device=self.device
            ),
            is_causal=self.has_causal_full_layers and self.windows[index] is None,
        )

    def get_new_tokens(self, which: int) -> torch.Tensor:
        """Return queries (0), keys (1) or values (2) of the step's tokens: [1, heads, N, size]."""
        parts = [
            sequence[which][chunk.start :]
            for sequence, chunk in zip(self.sequences, self.chunks, strict=True)
        ]
        return torch.cat(parts).transpose(0, 1)[None]

    def attend(self, cache: LayerCache) -> torch.Tensor:
        """Return the backend's output, [N, H, D of values]."""
        query, key, value = (self.get_new_tokens(which).to(self.device) for which in range(3))
        return self.backend.attend(cache, query, key, value, scaling=self.scaling)[0]

    def run(self) -> list[torch.Tensor]:
        self.backend.prepare(self.layout)
        return [self.attend(cache) for cache in self.caches]

    def get_expected(self, window: int | None) -> torch.Tensor:
        outputs = []
        for (query, key, value), chunk in zip(self.sequences, self.chunks, strict=True):
            queries = torch.arange(chunk.start, chunk.end)[:, None]
            keys = torch.arange(chunk.end)
            until = torch.tensor([chunk.get_attend_until(int(p)) for p in queries])[:, None]
            if self.has_causal_full_layers and window is None:
                until = queries + 1
            mask = keys < until
            if window is not None:
                mask &= keys > queries - window
            outputs.append(attend_densely(query[chunk.start :], key, value, mask, self.scaling))
        return torch.cat(outputs)

    def check(self) -> None:
        atol, rtol = TOLERANCES[self.dtype]
        for output, window in zip(self.run(), self.windows, strict=True):
            torch.testing.assert_close(
                output.cpu(), self.get_expected(window), atol=atol, rtol=rtol
            )
