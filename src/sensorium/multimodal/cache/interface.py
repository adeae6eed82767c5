"""What every cache of processed items offers, whatever it keeps and wherever that lies.

A request holds an `ItemHandle` for each item from the time it was found or processed until the
core has taken it; for that long a cache does not evict the item. `release` ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, ProcessedItem
from sensorium.types.transfer import MissingItems, ShmReference, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Since the start; `num_items` and `num_bytes` are of now. `num_resends`: items that the core
    had lost. `num_oversize`: items that no room could be made for.
    """

    num_queries: int = 0
    num_hits: int = 0
    num_evictions: int = 0
    num_resends: int = 0
    num_oversize: int = 0
    num_items: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemHandle:
    """One item of one request, on its way to the core.

    `kwargs`: its tensors, where the frontend has them. `reference`: its place in shared memory,
    leased. Neither: the core has the tensors. `is_hit`: the cache had it.
    """

    modality: str
    mm_hash: str
    layout: ItemLayout | None
    num_bytes: int
    is_hit: bool
    kwargs: MultiModalKwargsItem | None = None
    reference: ShmReference | None = None


class ProcessorCache(Protocol):
    """Safe to use from several threads."""

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        """Whether `get_and_update_item` would hit. Changes neither order nor statistics."""
        ...

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        """A handle for the item, which becomes the most recently used.

        If the cache has it: one query, one hit. If not, and `item` is given: one query, and the
        item is kept if there is room for it. If not, and there is none: `None`, and nothing is
        counted; the caller comes back with the item.

        With `needs_layout` (the prompt has yet to be expanded) the cache "has" only what has a
        layout. An entry without one takes over the layout of `item`, and keeps its own tensors.
        """
        ...

    def touch(self, mm_hash: str) -> None:
        """Make it the most recently used, if it is there. Counts nothing."""
        ...

    def release(self, handles: Iterable[ItemHandle]) -> None:
        """These may be evicted, as far as this request is concerned. Each once."""
        ...

    def clear_cache(self) -> None:
        """Forget everything. Handles that are out stay good."""
        ...

    def statistics(self) -> CacheStatistics: ...


class SenderCache(ProcessorCache, Protocol):
    """The frontend's half of a cache that reaches to a core."""

    def make_transfer(self, handles: Sequence[ItemHandle]) -> Transfer:
        """What goes to the core with a request of these items. Called in the order of sending;
        what it returns must be sent.
        """
        ...

    def handle_missing(self, missing: MissingItems) -> None:
        """The core lacks these: no longer believe that it has them.

        The caller then makes another transfer. A handle that has its tensors serves again. For one
        of the missing that has none, the caller asks for the item as if it were new (another
        request may have brought it back; if not, it is processed again), and releases the old
        handle: one more query.
        """
        ...


class SharedCache(SenderCache, Protocol):
    """A cache into which other processes put items."""

    def adopt(self, mm_hash: str, reference: ShmReference) -> ItemHandle | None:
        """A handle for an item that another process has put there for us: one query, no hit.
        `None` if it is gone already; then nothing is counted.
        """
        ...


class ReceiverCache(Protocol):
    """The core's half. Not thread-safe: one core, one loop."""

    def receive(
        self, mm_hashes: Sequence[str], transfer: Transfer
    ) -> dict[str, MultiModalKwargsItem] | MissingItems:
        """The tensors of a request's items, or what has to be sent (then nothing is held)."""
        ...

    def release(self, mm_hashes: Iterable[str]) -> None:
        """A request that had received these has ended. Each once per `receive`."""
        ...

    def clear_cache(self) -> None: ...

    def statistics(self) -> CacheStatistics: ...
