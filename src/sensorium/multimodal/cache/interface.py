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
    """The counters of a cache since its start, and its content at this moment.

    A cache updates an instance of its own, and returns copies of it.
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
    """A reference to a processed media item, which keeps the item in a cache until it is released.

    A request has one handle for each of its items. If a handle has neither tensors (`kwargs`) nor a
    `reference`, the engine core has the tensors already.
    """

    modality: str
    mm_hash: str
    layout: ItemLayout | None
    num_bytes: int
    is_hit: bool = False  # the cache had the item before this request
    kwargs: MultiModalKwargsItem | None = None  # the tensors, where the frontend has them
    reference: ShmReference | None = None  # a lease on the place in shared memory


class ProcessorCache(Protocol):
    """A cache of processed media items that several threads may use."""

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        """Return True if the cache has the media item, so that `get_and_update_item` would find it.

        With `needs_layout`, an entry without a layout (the text that replaces the item's marker in
        a prompt) counts as absent. This call changes neither the order of eviction nor the
        statistics.
        """
        ...

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        """Return a handle for a media item, and store `item` if the cache does not have it yet.

        The handle keeps the item in the cache until `release`, and the item becomes the most
        recently used. If the cache has the item, that counts as a query and a hit. If it does not
        and `item` is given, that counts as a query, and `item` is stored if there is room. If it
        does not and `item` is None, return None and count nothing: the caller processes the item
        and calls again.

        With `needs_layout`, an entry without a layout (the text that replaces the item's marker in
        a prompt) counts as absent. If `item` is given, such an entry takes over its layout and
        keeps its own tensors.
        """
        ...

    def release(self, handles: Iterable[ItemHandle]) -> None:
        """Release the handles, so that items which no other request holds may be evicted.

        Each handle must be released exactly once.
        """
        ...

    def clear_cache(self) -> None:
        """Remove all items, while the handles that were given out stay valid."""
        ...

    def statistics(self) -> CacheStatistics: ...


class SenderCache(ProcessorCache, Protocol):
    """The frontend's side of a cache of processed media items that are sent to an engine core.

    The frontend is the process that prepares requests. The engine core is the process that
    schedules them and runs the model.
    """

    def make_transfer(self, handles: Sequence[ItemHandle]) -> Transfer:
        """Return the message that brings the media items of a request to the engine core.

        Every message must be sent, and in the order in which the messages were made.
        """
        ...

    def handle_missing(self, missing: MissingItems) -> None:
        """Record that the engine core has refused a request because it lacks these media items.

        The caller then makes another transfer. A handle with tensors can be used for it. For a
        handle without tensors, the caller first gets a new one from `get_and_update_item`, as for a
        new item, and releases the old one. That counts as one more query.
        """
        ...


class ReceiverCache(Protocol):
    """The engine core's side of a cache of processed media items that a frontend sends.

    It is not thread-safe, because only one thread of the core uses it.
    """

    def receive(
        self, mm_hashes: Sequence[str], transfer: Transfer
    ) -> dict[str, MultiModalKwargsItem] | MissingItems:
        """Return the tensors of a request's media items by `mm_hash`, and hold them for it.

        The items are held until `release`. If the engine core lacks some of them, hold nothing and
        return `MissingItems`, which lists those that have to be sent. `transfer` is the message
        that the frontend sent with the request.
        """
        ...

    def release(self, mm_hashes: Iterable[str]) -> None:
        """Release the media items of a request that has ended.

        Call this once for each call of `receive` that returned tensors.
        """
        ...

    def clear_cache(self) -> None: ...

    def statistics(self) -> CacheStatistics: ...
