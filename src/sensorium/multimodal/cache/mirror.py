"""The mirrored cache: the frontend decides which processed items the core keeps.

The leader (`MirrorSender`) decides what the core keeps. It owns the order, sizes and layouts of
what the core holds, and the tensors that were not sent yet. Its entries are *staged* (it has the
tensors, and never sent them) or *sent* (the core has the tensors, and the leader dropped them). The
follower (`MirrorReceiver`) owns the tensors in the core, and keeps and drops what it is ordered to.
An *epoch* is one life of the follower's cache, from one clearing to the next. A random number
identifies it.

Invariants:
  1. After message n, the follower keeps exactly what the leader had sent when it made n.
  2. Staged and sent entries together have at most `capacity_bytes`; so has the core.
  3. An item that is not inserted still travels with its request: no item waits for room.
  4. The messages of an epoch are applied in order or not at all. A message of another epoch, or out
     of order, changes nothing but the epoch.
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

UNKNOWN_EPOCH = 0  # no core has it: the core answers the first message with its own epoch


class MirrorSender(ItemTable):
    """A `SenderCache` in the frontend that decides which items one engine core keeps."""

    def __init__(self, capacity_bytes: int, *, epoch: int = UNKNOWN_EPOCH) -> None:
        super().__init__(capacity_bytes)
        self._epoch = epoch
        self._next_sequence = 0
        # Hashes of sent entries that were evicted here, which the next message orders the core to
        # drop.
        self._evictions: list[str] = []

    @property
    def has_pending_evictions(self) -> bool:
        """Return True if the core still holds evicted items, until the next message is sent."""
        with self._lock:
            return bool(self._evictions)

    def make_transfer(self, handles: Sequence[ItemHandle]) -> Transfer:
        """Return the message that brings a request's items to the core, and lists items to drop.

        Without handles it only lists items to drop. If a message is lost, or arrives twice or out
        of order, the core begins a new epoch.
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
        """Record which items the core lacks, so that they are sent again.

        The core's answers must be passed in the order in which they came. An item that was sent
        after the core gave this answer is not sent again. If the core has begun a new epoch, all
        sent items count as lost.
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
        """Record the removed entries that the core has to drop as well.

        A request may still hold a handle for such an item. If the handle has the tensors, they are
        sent again. If not, the core answers that they are missing, and the item is processed again.
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
        """Do nothing: the sender decides what is evicted, and requests keep their tensors alive."""

    def clear_cache(self) -> None:
        """Remove all items and begin a new epoch, which the next answer gives to the sender."""
        self.epoch = _make_epoch()
        self._num_applied = 0
        self._items.clear()
        self._counts.num_bytes = 0

    def statistics(self) -> CacheStatistics:
        return replace(self._counts, num_items=len(self._items))

    def _refuse(self, update: MirrorUpdate) -> None:
        """Begin a new epoch, after a message that does not follow the last one.

        Either a message was lost or came twice, or the sender is in another epoch. But if no
        message of this epoch has come yet, a message of another epoch is only late, and nothing
        changes.
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
