"""No cache at all: every item is processed for its request and travels with it.

Both halves keep nothing and count nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import MultiModalKwargsItem, ProcessedItem
from sensorium.types.transfer import MissingItems, ShmReference, Transfer


class UncachedSender:
    """A `SenderCache`."""

    def is_cached(self, mm_hash: str, *, needs_layout: bool = True) -> bool:
        del mm_hash, needs_layout
        return False

    def get_and_update_item(
        self, mm_hash: str, item: ProcessedItem | None = None, *, needs_layout: bool = True
    ) -> ItemHandle | None:
        del needs_layout
        if item is None:
            return None
        return ItemHandle(
            modality=item.modality,
            mm_hash=mm_hash,
            layout=item.layout,
            num_bytes=get_num_bytes(item.kwargs),
            is_hit=False,
            kwargs=item.kwargs,
        )

    def touch(self, mm_hash: str) -> None:
        pass

    def release(self, handles: Iterable[ItemHandle]) -> None:
        pass

    def clear_cache(self) -> None:
        pass

    def statistics(self) -> CacheStatistics:
        return CacheStatistics()

    def make_transfer(self, handles: Sequence[ItemHandle]) -> Transfer:
        return Transfer(
            payloads={
                handle.mm_hash: handle.kwargs for handle in handles if handle.kwargs is not None
            }
        )

    def handle_missing(self, missing: MissingItems) -> None:
        pass


class UncachedReceiver:
    """A `ReceiverCache`."""

    def receive(
        self, mm_hashes: Sequence[str], transfer: Transfer
    ) -> dict[str, MultiModalKwargsItem] | MissingItems:
        found = {}
        for mm_hash in dict.fromkeys(mm_hashes):
            payload = transfer.payloads.get(mm_hash)
            if isinstance(payload, ShmReference):
                raise InvariantError(f"{mm_hash} came as a reference to shared memory")
            if payload is not None:
                found[mm_hash] = payload
        missing = tuple(mm_hash for mm_hash in dict.fromkeys(mm_hashes) if mm_hash not in found)
        return MissingItems(mm_hashes=missing, epoch=0) if missing else found

    def release(self, mm_hashes: Iterable[str]) -> None:
        pass

    def clear_cache(self) -> None:
        pass

    def statistics(self) -> CacheStatistics:
        return CacheStatistics()
