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

UNKNOWN_EPOCH = 0  # no core has it: the first message is answered with the true one


class MirrorSender(ItemTable):
    """A `SenderCache` that leads one core. Without a capacity it only carries items to the core."""

    def __init__(self, capacity_bytes: int, *, epoch: int = UNKNOWN_EPOCH) -> None:
        super().__init__(capacity_bytes)
        self._epoch = epoch
        self._next_sequence = 0
        # Hashes of sent entries that are no longer kept, and that the core does not know of yet.
        self._evictions: list[str] = []

    @property
    def has_pending_evictions(self) -> bool:
        """Return True if the core holds items that it would drop at the next message.

        An idle frontend may send `make_transfer(())` alone, without a request.
        """
        with self._lock:
            return bool(self._evictions)

    def make_transfer(self, handles: Sequence[ItemHandle]) -> Transfer:
        """Return the message of a request, or without handles a message of evictions alone.

        The caller sends in the order of these calls. A message that is lost nevertheless, or comes
        twice, costs a new epoch.
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
        """Note what the core lacks. Call this in the order in which the answers came.

        What was sent after the core gave this answer is still expected to be there.
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
        """Note what the core has to drop, too.

        A request that holds a handle of it sends the tensors again, if the handle has them. If not,
        the core answers that they are missing, and the caller brings them back.
        """
        self._evictions += [entry.mm_hash for entry in entries if entry.sent_in is not None]


class MirrorReceiver:
    """A `ReceiverCache` that follows the updates of one leader.

    Every message has to be passed to `receive`, also that of a request which is refused. Payloads
    without an update (the leader has no capacity) are passed on, neither kept nor counted.
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
        """Do nothing: an item that the leader evicts lives on in the requests that have it."""

    def clear_cache(self) -> None:
        """Forget everything. The leader learns this from the answer to its next message."""
        self.epoch = _make_epoch()
        self._num_applied = 0
        self._items.clear()
        self._counts.num_bytes = 0

    def statistics(self) -> CacheStatistics:
        return replace(self._counts, num_items=len(self._items))

    def _refuse(self, update: MirrorUpdate) -> None:
        """Begin a new epoch, unless the message is only a late one of the epoch before this.

        A message was lost or came twice, or the leader is new or still in an earlier epoch.
        """
        if update.epoch == self.epoch or self._num_applied:
            self.clear_cache()

    def _apply(self, update: MirrorUpdate, payloads: dict[str, MultiModalKwargsItem]) -> None:
        if not payloads.keys() >= set(update.inserts):
            raise InvariantError("an update inserts items that did not come with it")
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
        raise InvariantError(f"{mm_hash} came as a reference to shared memory")
    return payload


def _make_epoch() -> int:
    return secrets.randbits(63) or 1
