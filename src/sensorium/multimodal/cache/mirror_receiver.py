"""The follower of the mirrored cache: keeps in the core what the frontend says, and never chooses.

Owns the tensors. A life of it is an *epoch*; the messages of an epoch are applied in their order
or not at all.

Invariants:
  1. After message n it keeps exactly what the leader had sent when it made n.
  2. A message of another epoch, or out of order, changes nothing but the epoch.
  3. A new epoch begins empty. The messages that were under way when it began are refused without
     beginning another.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from sensorium.multimodal.cache.interface import CacheStatistics
from sensorium.multimodal.cache.own_tensors import own_tensors
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import MultiModalKwargsItem
from sensorium.types.transfer import MirrorUpdate, MissingItems, ShmReference, Transfer


class MirrorReceiver:
    """A `ReceiverCache`. Whoever takes messages passes each one to `receive` before it looks at the
    request, and also when it refuses that.
    """

    def __init__(self, epoch: int | None = None) -> None:
        self._epoch = _make_epoch() if epoch is None else epoch
        self._num_applied = 0  # messages of this epoch
        self._items: dict[str, MultiModalKwargsItem] = {}
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0
        self._num_queries = 0
        self._num_hits = 0
        self._num_evictions = 0
        self._num_resends = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    def get_sizes(self) -> dict[str, int]:
        """In bytes, by hash: what is kept."""
        return dict(self._sizes)

    def receive(
        self, mm_hashes: Sequence[str], transfer: Transfer
    ) -> dict[str, MultiModalKwargsItem] | MissingItems:
        wanted = tuple(dict.fromkeys(mm_hashes))
        payloads = {key: _as_tensors(key, value) for key, value in transfer.payloads.items()}
        update = transfer.update
        if update is not None:
            if not self._is_next(update):
                self._refuse(update)
                return self._make_missing(wanted)
            self._apply(update, payloads)
        return self._resolve(wanted, payloads)

    def release(self, mm_hashes: Iterable[str]) -> None:
        """Nothing to do: an item that the leader evicts lives on in the requests that have it."""

    def clear_cache(self) -> None:
        """The leader learns of it from the answer to its next message."""
        self._epoch = _make_epoch()
        self._num_applied = 0
        self._items.clear()
        self._sizes.clear()
        self._num_bytes = 0

    def statistics(self) -> CacheStatistics:
        """The capacity is the leader's to know."""
        return CacheStatistics(
            num_queries=self._num_queries,
            num_hits=self._num_hits,
            num_evictions=self._num_evictions,
            num_resends=self._num_resends,
            num_items=len(self._items),
            num_bytes=self._num_bytes,
        )

    def _is_next(self, update: MirrorUpdate) -> bool:
        return update.epoch == self._epoch and update.sequence == self._num_applied

    def _refuse(self, update: MirrorUpdate) -> None:
        """A message was lost or came twice, or the leader is a new one or behind an epoch."""
        if update.epoch == self._epoch or self._num_applied:
            self.clear_cache()

    def _apply(self, update: MirrorUpdate, payloads: dict[str, MultiModalKwargsItem]) -> None:
        if not payloads.keys() >= set(update.inserts):
            raise InvariantError("a message says to keep items that did not come with it")
        for mm_hash in update.evictions:
            self._drop(mm_hash)
        self._num_evictions += len(update.evictions)
        for mm_hash in update.inserts:
            self._drop(mm_hash)
            item = payloads[mm_hash] = own_tensors(payloads[mm_hash])
            self._items[mm_hash] = item
            self._sizes[mm_hash] = get_num_bytes(item)
            self._num_bytes += self._sizes[mm_hash]
        self._num_applied += 1

    def _drop(self, mm_hash: str) -> None:
        self._items.pop(mm_hash, None)
        self._num_bytes -= self._sizes.pop(mm_hash, 0)

    def _resolve(
        self, wanted: Sequence[str], payloads: dict[str, MultiModalKwargsItem]
    ) -> dict[str, MultiModalKwargsItem] | MissingItems:
        found = {key: self._items[key] for key in wanted if key in self._items}
        num_hits = len(found.keys() - payloads.keys())
        found |= {key: payloads[key] for key in wanted if key in payloads}
        missing = tuple(mm_hash for mm_hash in wanted if mm_hash not in found)
        if missing:
            return self._make_missing(missing)
        self._num_queries += len(found)
        self._num_hits += num_hits
        return found

    def _make_missing(self, mm_hashes: tuple[str, ...]) -> MissingItems:
        self._num_resends += len(mm_hashes)
        return MissingItems(mm_hashes=mm_hashes, epoch=self._epoch, num_applied=self._num_applied)


def _as_tensors(mm_hash: str, payload: MultiModalKwargsItem | ShmReference) -> MultiModalKwargsItem:
    if isinstance(payload, ShmReference):
        raise InvariantError(f"{mm_hash} came as a reference to shared memory")
    return payload


def _make_epoch() -> int:
    return secrets.randbits(63) or 1
