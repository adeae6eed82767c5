"""The interfaces of all caches of processed items, wherever they keep them.

A request holds an `ItemHandle` for each item from when it was found or processed until the core has
received it. No cache evicts an item before its handles are released.
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
    """The counters of a cache, and its size at this moment. Caches return a copy of them."""

    num_queries: int = 0
    num_hits: int = 0
    num_evictions: int = 0
    num_resends: int = 0  # items that are sent again, because the core had lost them
    num_oversize: int = 0  # items that are not cached, because no room could be made for them
    num_items: int = 0  # at this moment
    num_bytes: int = 0  # at this moment
    capacity_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemHandle:
    """A request's reference to one processed item, which keeps the item in a cache until released.

    A handle with neither `kwargs` nor a `reference` is for an item that the core already has.
    """

    modality: str
    mm_hash: str
    layout: ItemLayout | None
    num_bytes: int
    is_hit: bool = False  # the cache had the item before this request
    kwargs: MultiModalKwargsItem | None = None  # the tensors, where the frontend has them
    # The item's place in shared memory. A lease (a hold) keeps the item there until the release.
    reference: ShmReference | None = None


class ProcessorCache(Protocol):
    """A thread-safe cache of processed items.

    With `needs_layout`, an entry without a layout counts as absent.
    """

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        """Return True if the item is cached, without counting a query or marking it as used."""
        ...

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        """Return a handle for an item, and store `item` if the cache does not have it yet.

        The item becomes the most recently used, and stays until `release`. If the cache has it,
        that counts as a query and a hit. If not and `item` is given, that counts as a query, and
        `item` is stored if there is room. If not and `item` is None, return None and count nothing:
        the caller processes the item and calls again. An entry that counts as absent only because
        it has no layout gets the layout of `item`, and keeps its own tensors.
        """
        ...

    def release(self, handles: Iterable[ItemHandle]) -> None:
        """Release handles, each exactly once, so that their items may be evicted."""
        ...

    def clear_cache(self) -> None:
        """Remove all items, while the handles that were given out stay valid."""
        ...

    def statistics(self) -> CacheStatistics: ...


class SenderCache(ProcessorCache, Protocol):
    """The frontend's side of a cache of processed items that are sent to an engine core."""

    def make_transfer(self, handles: Sequence[ItemHandle]) -> Transfer:
        """Return the message that brings the items of a request to the core.

        Every message must be sent, in the order in which the messages were made.
        """
        ...

    def handle_missing(self, missing: MissingItems) -> None:
        """Record that the core has refused a request because it lacks these items.

        The caller then makes another transfer. A handle with tensors can be used again. A handle
        without tensors must be released, and replaced by a new one from `get_and_update_item`, as
        for a new item (that counts as one more query).
        """
        ...


class ReceiverCache(Protocol):
    """The core's side of a cache of processed items from a frontend, for one thread."""

    def receive(
        self, mm_hashes: Sequence[str], transfer: Transfer
    ) -> dict[str, MultiModalKwargsItem] | MissingItems:
        """Return the tensors of a request's items by `mm_hash`, and hold them until `release`.

        `transfer` came with the request. If the core lacks items, hold nothing, and return a
        `MissingItems` that lists the items to send.
        """
        ...

    def release(self, mm_hashes: Iterable[str]) -> None:
        """Release the items of a request that has ended, once per `receive` that gave tensors."""
        ...

    def clear_cache(self) -> None: ...

    def statistics(self) -> CacheStatistics: ...
