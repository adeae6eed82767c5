"""The processed tensors of all requests that have not ended, by content.

Owned by the engine core; the worker reads it. Requests with the same item share one entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.multimodal import MultiModalKwargsItem
from sensorium.types.request import EngineCoreRequest


class PayloadStore(Mapping[str, MultiModalKwargsItem]):
    def __init__(self) -> None:
        self._items: dict[str, MultiModalKwargsItem] = {}
        self._num_users: dict[str, int] = {}
        self._hashes_of: dict[str, frozenset[str]] = {}

    def __getitem__(self, mm_hash: str) -> MultiModalKwargsItem:
        return self._items[mm_hash]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, request: EngineCoreRequest, payloads: Mapping[str, MultiModalKwargsItem]) -> None:
        """Keep a request's items until `release`. Those that are here already need not be
        brought again.
        """
        if request.request_id in self._hashes_of:
            raise InvariantError(f"payloads of request {request.request_id!r} were added twice")
        hashes = frozenset(feature.mm_hash for feature in request.mm_features)
        for mm_hash in hashes:
            if mm_hash not in self._items and mm_hash not in payloads:
                raise RequestError(
                    f"the tensors of media item {mm_hash} did not come with the request"
                )
        for mm_hash in hashes:
            if mm_hash not in self._items:
                self._items[mm_hash] = payloads[mm_hash]
            self._num_users[mm_hash] = self._num_users.get(mm_hash, 0) + 1
        self._hashes_of[request.request_id] = hashes

    def release(self, request_id: str) -> None:
        for mm_hash in self._hashes_of.pop(request_id, ()):
            self._num_users[mm_hash] -= 1
            if self._num_users[mm_hash] == 0:
                del self._num_users[mm_hash]
                del self._items[mm_hash]
