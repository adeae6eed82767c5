"""The mirrored cache: the frontend leads, and the core follows.

The leader (`MirrorSender`) decides what the core keeps. It owns the order, the sizes and the
layouts of what the core holds, and the tensors of what was not sent yet. An entry is *staged* (its
tensors are here and were never sent) or *sent* (the core has the tensors, and here they are
dropped). The follower (`MirrorReceiver`) owns the tensors in the core and never chooses. A life of
the follower is an *epoch*.

Invariants:
  1. After message n, the follower keeps exactly what the leader had sent when it made n.
  2. Staged and sent entries together have at most `capacity_bytes`; so has the core.
  3. What is not inserted travels with its request all the same: an item never waits for room.
  4. The messages of an epoch are applied in their order or not at all. A message of another epoch,
     or out of order, changes nothing but the epoch.
  5. A new epoch begins empty. The messages that were under way when it began are refused without
     beginning another.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.cache.item_table import ItemEntry, ItemTable, own_tensors
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import (
    MirrorUpdate,
    MissingItems,
    MultiModalKwargsItem,
    ShmReference,
    Transfer,
)

UNKNOWN_EPOCH = 0  # of no core: the core answers the first message with its own epoch


class MirrorSender(ItemTable):
    """A `SenderCache` in the frontend that decides which media items one engine core keeps.

    With a capacity of 0 bytes it keeps nothing, and sends each item with its request.
    """

    def __init__(self, capacity_bytes: int, *, epoch: int = UNKNOWN_EPOCH) -> None:
        super().__init__(capacity_bytes)
        self._epoch = epoch
        self._next_sequence = 0
        # Hashes of sent entries that are no longer kept, and that the core does not know of yet.
        self._evictions: list[str] = []

    @property
    def has_pending_evictions(self) -> bool:
        """Return True if the engine core still holds items that were evicted here.

        The core drops them at the next message. A frontend without requests may send
        `make_transfer(())` for that purpose.
        """
        with self._lock:
            return bool(self._evictions)

    def make_transfer(self, handles: Sequence[ItemHandle]) -> Transfer:
        """Return the message that brings the media items of a request to the engine core.

        The message also lists the items that the core has to drop. Without handles it does only
        that. Messages must be sent in the order in which they were made. If one is lost or comes
        twice, the core clears its cache and begins a new epoch (a new count of messages).
        """
        with self._lock:
            self._rebind(handles)
            payloads: dict[str, MultiModalKwargsItem] = {}
            inserts = []
            for handle in handles:
                entry = self._held[handle]
                if entry not in self._lru:
                    if handle.kwargs is not None:
                        payloads[handle.mm_hash] = handle.kwargs
                elif entry.kwargs is not None:
                    payloads[entry.mm_hash] = entry.kwargs
                    inserts.append(entry.mm_hash)
                    entry.kwargs, entry.sent_in = None, self._next_sequence
            return Transfer(payloads=payloads, update=self._take_update(inserts))

    def handle_missing(self, missing: MissingItems) -> None:
        """Record which media items the engine core lacks, so that they are sent again.

        `missing` is the core's answer to a message. Answers must be passed in the order in which
        they came. An item that was sent after the core gave this answer is not sent again. If the
        core has begun a new epoch (its cache was cleared), all items that were sent count as lost.
        """
        with self._lock:
            self._counts.num_resends += len(missing.mm_hashes)
            if missing.epoch != self._epoch:
                self._forget(e for e in tuple(self._lru) if e.sent_in is not None)
                self._evictions.clear()
                self._epoch = missing.epoch
                self._next_sequence = 0
                return
            for mm_hash in missing.mm_hashes:
                entry = self._lru.get(mm_hash)
                if entry and entry.sent_in is not None and entry.sent_in < missing.num_applied:
                    self._forget([entry])

    def _take_update(self, inserts: Sequence[str]) -> MirrorUpdate | None:
        if not self._lru.capacity_bytes:
            return None
        update = MirrorUpdate(
            epoch=self._epoch,
            sequence=self._next_sequence,
            inserts=tuple(inserts),
            evictions=tuple(self._evictions),
        )
        self._next_sequence += 1
        self._evictions.clear()
        return update

    def _note_removals(self, entries: Iterable[ItemEntry]) -> None:
        """Record the removed entries that the engine core has to drop as well.

        A request may still hold a handle (a reference) for such an item. Then the tensors are sent
        again if the handle has them. If not, the core answers that they are missing, and the item
        is processed again.
        """
        self._evictions += [entry.mm_hash for entry in entries if entry.sent_in is not None]


class MirrorReceiver:
    """A `ReceiverCache` in the engine core that keeps what the frontend's `MirrorSender` decides.

    Every message must be passed to `receive`, even if its request is refused. The items of a
    message without an update (the sender has no capacity) are returned, but neither kept nor
    counted.
    """

    def __init__(self, epoch: int | None = None) -> None:
        self.epoch = _make_epoch() if epoch is None else epoch
        self._num_applied = 0  # messages of this epoch
        self._items: dict[str, MultiModalKwargsItem] = {}  # mm_hash -> tensors
        self._counts = CacheStatistics()  # the capacity stays 0, because only the leader has one

    def receive(
        self, mm_hashes: Sequence[str], transfer: Transfer
    ) -> dict[str, MultiModalKwargsItem] | MissingItems:
        wanted = tuple(dict.fromkeys(mm_hashes))
        payloads = {key: _as_tensors(key, value) for key, value in transfer.payloads.items()}
        update = transfer.update
        if update is not None:
            if (update.epoch, update.sequence) != (self.epoch, self._num_applied):
                self._refuse(update)
                return self._make_missing(wanted)
            self._apply(update, payloads)
        missing = tuple(key for key in wanted if key not in payloads and key not in self._items)
        if missing:
            return self._make_missing(missing)
        if update is not None:
            self._counts.num_queries += len(wanted)
            self._counts.num_hits += sum(key not in payloads for key in wanted)
        return {key: payloads[key] if key in payloads else self._items[key] for key in wanted}

    def release(self, mm_hashes: Iterable[str]) -> None:
        """Do nothing, because the sender decides when an item is evicted.

        A request that has received an item keeps its tensors alive after the eviction.
        """

    def clear_cache(self) -> None:
        """Remove all media items, and begin a new epoch.

        An epoch is the time between two clearings, and has a random number. The sender learns of
        the new epoch from the answer to its next message.
        """
        self.epoch = _make_epoch()
        self._num_applied = 0
        self._items.clear()
        self._counts.num_bytes = 0

    def statistics(self) -> CacheStatistics:
        return replace(self._counts, num_items=len(self._items))

    def _refuse(self, update: MirrorUpdate) -> None:
        """Clear the cache and begin a new epoch, after a message that does not follow the last one.

        An epoch is the time between two clearings. The message shows that another one was lost or
        came twice, or that the sender counts for another epoch. If no message of the current epoch
        has come yet, a message of another epoch is only late, and nothing changes.
        """
        if update.epoch == self.epoch or self._num_applied:
            self.clear_cache()

    def _apply(self, update: MirrorUpdate, payloads: dict[str, MultiModalKwargsItem]) -> None:
        if not payloads.keys() >= set(update.inserts):
            raise InvariantError("a cache update names new media items that did not come with it")
        for mm_hash in update.evictions:
            self._drop(mm_hash)
        self._counts.num_evictions += len(update.evictions)
        for mm_hash in update.inserts:
            self._drop(mm_hash)
            item = self._items[mm_hash] = payloads[mm_hash] = own_tensors(payloads[mm_hash])
            self._counts.num_bytes += get_num_bytes(item)
        self._num_applied += 1

    def _drop(self, mm_hash: str) -> None:
        self._counts.num_bytes -= get_num_bytes(self._items.pop(mm_hash, {}))

    def _make_missing(self, mm_hashes: tuple[str, ...]) -> MissingItems:
        self._counts.num_resends += len(mm_hashes)
        return MissingItems(mm_hashes=mm_hashes, epoch=self.epoch, num_applied=self._num_applied)


def _as_tensors(mm_hash: str, payload: MultiModalKwargsItem | ShmReference) -> MultiModalKwargsItem:
    if isinstance(payload, ShmReference):
        raise InvariantError(f"media item {mm_hash} came as a reference, not as tensors")
    return payload


def _make_epoch() -> int:
    return secrets.randbits(63) or 1
