"""The processed tensors of all requests that have not ended, by content.

Owned by the engine core; the worker reads it. What a request brings goes through the core's half
of the processor cache, which also has what it need not bring.

Invariant: what is read for an item belongs to a request that has not ended. Two requests may have
received equal tensors that lie in different places, each held for its own request only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sensorium.multimodal.cache.interface import ReceiverCache
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import MultiModalKwargsItem
from sensorium.types.request import EngineCoreRequest
from sensorium.types.transfer import MissingItems, Transfer


class PayloadStore(Mapping[str, MultiModalKwargsItem]):
    def __init__(self, receiver: ReceiverCache) -> None:
        self.receiver = receiver
        self._items: dict[str, dict[str, MultiModalKwargsItem]] = {}  # by hash, by request
        self._hashes_of: dict[str, tuple[str, ...]] = {}

    def __getitem__(self, mm_hash: str) -> MultiModalKwargsItem:
        return next(iter(self._items[mm_hash].values()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, request: EngineCoreRequest, transfer: Transfer) -> MissingItems | None:
        """Keep a request's items until `release`; or say which of them have to be sent, and keep
        nothing.
        """
        if request.request_id in self._hashes_of:
            raise InvariantError(f"payloads of request {request.request_id!r} were added twice")
        hashes = tuple(dict.fromkeys(feature.mm_hash for feature in request.mm_features))
        received = self.receiver.receive(hashes, transfer)
        if isinstance(received, MissingItems):
            return received
        for mm_hash in hashes:
            self._items.setdefault(mm_hash, {})[request.request_id] = received[mm_hash]
        self._hashes_of[request.request_id] = hashes
        return None

    def release(self, request_id: str) -> None:
        hashes = self._hashes_of.pop(request_id, ())
        for mm_hash in hashes:
            del self._items[mm_hash][request_id]
            if not self._items[mm_hash]:
                del self._items[mm_hash]
        self.receiver.release(hashes)
