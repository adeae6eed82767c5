"""What callers' own names stand for, where several frontends serve: they all see the same.

A binding is an item of the shared store, under a name of its own: whoever puts it first has bound
the uuid, and it is forgotten as other items are.
"""

from __future__ import annotations

import torch

from sensorium.multimodal.cache.shm_store import ShmEntry, ShmStore
from sensorium.multimodal.hasher import MediaHasher
from sensorium.multimodal.item_codec import as_bytes
from sensorium.multimodal.uuid_bindings import (
    BoundSource,
    UuidBindings,
    UuidScope,
    refuse_uuid,
)
from sensorium.types.multimodal import ProcessedItem

_DIGEST, _IS_ENCODED = "digest", "is_encoded"


class SharedUuidBindings(UuidBindings):
    """What this process knows anyway is not looked for."""

    def __init__(self, store: ShmStore, hasher: MediaHasher) -> None:
        super().__init__()
        self._store = store
        self._hasher = hasher

    def get(self, uuid: str, *, modality: str, scope: UuidScope) -> BoundSource | None:
        found = super().get(uuid, modality=modality, scope=scope)
        if found is None:
            entry = self._store.acquire(
                self._hasher.name_uuid(uuid, modality, scope.cache_salt, scope.client)
            )
            found = None if entry is None else self._take(entry)
        return found

    def check(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        found = self.get(uuid, modality=modality, scope=scope)
        if found not in (None, source):
            raise refuse_uuid(uuid, modality)

    def bind(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        super().check(uuid, source, modality=modality, scope=scope)
        name = self._hasher.name_uuid(uuid, modality, scope.cache_salt, scope.client)
        reference, is_found = self._store.put_or_find(_make_item(name, modality, source))
        if reference is not None:  # else there is no room, and it is known here only
            entry = self._store.lease(reference) if is_found else None
            self._store.release(reference)
            if entry is not None and self._take(entry) != source:
                raise refuse_uuid(uuid, modality)
        super().bind(uuid, source, modality=modality, scope=scope)

    def _take(self, entry: ShmEntry) -> BoundSource:
        """Read a binding, and give back its lease."""
        try:
            tensors = self._store.open(entry.reference)
            digest = bytes(as_bytes(tensors[_DIGEST]).tolist()).decode()
            return BoundSource(digest=digest, is_encoded=bool(tensors[_IS_ENCODED].item()))
        finally:
            self._store.release(entry.reference)


def _make_item(name: str, modality: str, source: BoundSource) -> ProcessedItem:
    digest = torch.tensor(list(source.digest.encode()), dtype=torch.uint8)
    kwargs = {_DIGEST: digest, _IS_ENCODED: torch.tensor(source.is_encoded)}
    return ProcessedItem(modality=modality, mm_hash=name, kwargs=kwargs, layout=None)
