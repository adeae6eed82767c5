"""The interfaces of all caches of processed items, whatever they keep and wherever that lies.

A request holds an `ItemHandle` for each item from the time it was found or processed until the
core has taken it. A cache does not evict an item before its handles are released.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sensorium.types.multimodal import (
    ItemLayout,
    MissingItems,
    MultiModalKwargsItem,
    ProcessedItem,
    ShmReference,
    Transfer,
)


@dataclass(slots=True, kw_only=True)
class CacheStatistics:
    """Counts since the start, and what is kept at this moment.

    A cache counts in an instance of its own, and gives out copies.
    """

    num_queries: int = 0
    num_hits: int = 0
    num_evictions: int = 0
    num_resends: int = 0  # items that the core had lost
    num_oversize: int = 0  # items that no room could be made for
    num_items: int = 0  # at this moment
    num_bytes: int = 0  # at this moment
    capacity_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemHandle:
    """One item of one request on its way to the core.

    If it has neither tensors nor a reference, the core has the tensors already.
    """

    modality: str
    mm_hash: str
    layout: ItemLayout | None
    num_bytes: int
    is_hit: bool = False  # the cache had it
    kwargs: MultiModalKwargsItem | None = None  # the tensors, where the frontend has them
    reference: ShmReference | None = None  # a lease on the place in shared memory


class ProcessorCache(Protocol):
    """A cache of processed items that several threads may use."""

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        """Return True if `get_and_update_item` would hit. Change neither order nor statistics."""
        ...

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        """Return a handle for the item, which becomes the most recently used.

        If the cache has the item, count a query and a hit. If it does not and `item` is given,
        count a query and keep `item` if there is room for it. Otherwise return `None` and count
        nothing: the caller will come back with the item.

        With `needs_layout` (the prompt has yet to be expanded) an entry without a layout does not
        count as had. Such an entry takes over the layout of `item`, and keeps its own tensors.
        """
        ...

    def release(self, handles: Iterable[ItemHandle]) -> None:
        """Let the items be evicted, if no other request holds them. Release a handle once."""
        ...

    def clear_cache(self) -> None:
        """Forget everything. Handles that were given out stay valid."""
        ...

    def statistics(self) -> CacheStatistics: ...


class SenderCache(ProcessorCache, Protocol):
    """The frontend's side of a cache that reaches to a core."""

    def make_transfer(self, handles: Sequence[ItemHandle]) -> Transfer:
        """Return what goes to the core with a request of these items.

        Transfers must be sent, in the order in which they were made.
        """
        ...

    def handle_missing(self, missing: MissingItems) -> None:
        """Note that the core does not have these items.

        The caller then makes another transfer. A handle with tensors serves again. In place of one
        without, the caller asks for the item as if it were new (another request may have brought
        it back; if not, it is processed again), and releases the old handle. That is one more
        query.
        """
        ...


class ReceiverCache(Protocol):
    """The core's side of a cache. It is not thread-safe: a core has one loop."""

    def receive(
        self, mm_hashes: Sequence[str], transfer: Transfer
    ) -> dict[str, MultiModalKwargsItem] | MissingItems:
        """Return the tensors of a request's items by `mm_hash`, and hold them for it.

        Hold nothing if some have to be sent, and return these.
        """
        ...

    def release(self, mm_hashes: Iterable[str]) -> None:
        """Give up what an ended request had received: once for each call of `receive`."""
        ...

    def clear_cache(self) -> None: ...

    def statistics(self) -> CacheStatistics: ...
