"""The leader of the mirrored cache: decides what the core keeps, and says so in every message.

Owns the order, the sizes and the layouts of what the core holds, and the tensors of what was not
sent yet. An entry is *staged* (its tensors are here: processed or injected, never sent) or *sent*
(the core has them; here they are dropped).

Invariants:
  1. After it has applied message n, the core keeps exactly what was sent when n was made.
  2. Staged and sent entries together have at most `capacity_bytes`; so has the core.
  3. What is not inserted travels with its request all the same: an item never waits for room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.cache.item_table import ItemEntry, ItemTable
from sensorium.types.multimodal import MultiModalKwargsItem, ProcessedItem
from sensorium.types.transfer import MirrorUpdate, MissingItems, Transfer

UNKNOWN_EPOCH = 0  # no core has it: the first message is answered with the true one


class MirrorSender:
    """A `SenderCache`. One leader per core."""

    def __init__(self, capacity_bytes: int, *, epoch: int = UNKNOWN_EPOCH) -> None:
        self._table = ItemTable(capacity_bytes)
        self._epoch = epoch
        self._next_sequence = 0
        # Sent entries that are no longer kept here, and that the core has not been told of.
        self._evictions: list[str] = []
        self._num_resends = 0
        self._lock = Lock()

    @property
    def has_pending_evictions(self) -> bool:
        """Whether the core holds what it would drop at the next message. An idle frontend may send
        `make_transfer(())` alone, without a request.
        """
        with self._lock:
            return bool(self._evictions)

    @property
    def num_handles(self) -> int:
        """Handles that are out."""
        with self._lock:
            return self._table.num_handles

    def get_sent_sizes(self) -> dict[str, int]:
        """In bytes, by hash: what the core is believed to keep once it has applied all messages,
        and evicted what is pending.
        """
        with self._lock:
            return {e.key: e.num_bytes for e in self._table if e.sent_in is not None}

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        with self._lock:
            return self._table.is_cached(mm_hash, needs_layout=needs_layout)

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        with self._lock:
            handle, victims = self._table.acquire(mm_hash, item, needs_layout=needs_layout)
            self._add_evictions(victims)
            return handle

    def touch(self, mm_hash: str) -> None:
        with self._lock:
            self._table.touch(mm_hash)

    def release(self, handles: Iterable[ItemHandle]) -> None:
        with self._lock:
            self._table.release(handles)

    def clear_cache(self) -> None:
        """A request whose handle has tensors sends them; another one is told by the core what it
        lacks, and heals.
        """
        with self._lock:
            self._forget(tuple(self._table))

    def statistics(self) -> CacheStatistics:
        with self._lock:
            return self._table.statistics(self._num_resends)

    def make_transfer(self, handles: Sequence[ItemHandle]) -> Transfer:
        """The message of a request; with no handles, of evictions alone.

        The caller sends in the order of these calls. A message that is lost nevertheless, or comes
        twice, costs a new epoch.
        """
        with self._lock:
            self._add_evictions(self._table.rebind(handles))
            payloads: dict[str, MultiModalKwargsItem] = {}
            inserts = []
            for handle in handles:
                entry = self._table.get_held(handle)
                if entry is None:
                    if handle.kwargs is not None:
                        payloads[handle.mm_hash] = handle.kwargs
                elif entry.kwargs is not None:
                    payloads[entry.key] = entry.kwargs
                    inserts.append(entry.key)
                    entry.kwargs, entry.sent_in = None, self._next_sequence
            return Transfer(payloads=payloads, update=self._take_update(inserts))

    def handle_missing(self, missing: MissingItems) -> None:
        """Called in the order in which the answers came. What was sent after the core gave this
        answer is still believed to be there.
        """
        with self._lock:
            self._num_resends += len(missing.mm_hashes)
            if missing.epoch != self._epoch:
                self._forget(e for e in tuple(self._table) if e.sent_in is not None)
                self._evictions.clear()
                self._epoch = missing.epoch
                self._next_sequence = 0
                return
            entries = map(self._table.get, missing.mm_hashes)
            self._forget(e for e in entries if e and _was_sent_before(e, missing.num_applied))

    def _take_update(self, inserts: Sequence[str]) -> MirrorUpdate:
        update = MirrorUpdate(
            epoch=self._epoch,
            sequence=self._next_sequence,
            inserts=tuple(inserts),
            evictions=tuple(self._evictions),
        )
        self._next_sequence += 1
        self._evictions.clear()
        return update

    def _forget(self, entries: Iterable[ItemEntry]) -> None:
        for entry in entries:
            self._table.remove(entry)
            self._add_evictions([entry])

    def _add_evictions(self, victims: Iterable[ItemEntry]) -> None:
        self._evictions += [entry.key for entry in victims if entry.sent_in is not None]


def _was_sent_before(entry: ItemEntry, num_applied: int) -> bool:
    return entry.sent_in is not None and entry.sent_in < num_applied
