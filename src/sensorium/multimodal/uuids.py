"""Uuids: the names that clients give to media, and what they refer to.

A uuid is a promise of the client, not an identity. It is bound to the source that it first came
with, and only within its scope: the names of one client neither serve nor block another. The least
recently used binding is forgotten first.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch

from sensorium.multimodal.cache.shm_store import ShmEntry, ShmStore
from sensorium.multimodal.hasher import MediaHasher
from sensorium.multimodal.item_codec import as_bytes
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ProcessedItem
from sensorium.utils.lru import LruCache

MAX_UUID_LENGTH = 128
_DIGEST, _IS_ENCODED = "digest", "is_encoded"  # tensors of a binding in a store


class UuidScope(NamedTuple):
    """The scope in which a uuid refers to one source."""

    client: str | None = None  # digest of an API key; None: all clients without a key
    cache_salt: str | None = None  # of the request


_Key = tuple[UuidScope, str, str]  # scope, modality, uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSource:
    """The source that a uuid refers to."""

    digest: str
    is_encoded: bool  # it was a file, not pixels or samples in process


class UuidBindings:
    """The bindings of one process. Several threads may use it."""

    def __init__(self, max_entries: int = 65_536) -> None:
        self._sources: LruCache[_Key, BoundSource] = LruCache(max_entries)
        self._lock = Lock()  # between a check and its binding

    def get(self, uuid: str, *, modality: str, scope: UuidScope) -> BoundSource | None:
        """Return the source that the uuid is bound to, and keep the binding for longer."""
        return self._sources.get((scope, modality, uuid))

    def check(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        """Raise `RequestError` if the uuid is bound to another source."""
        if self._sources.get((scope, modality, uuid)) not in (None, source):
            raise _make_refusal(uuid, modality)

    def bind(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        """Bind the uuid to a source that was processed: a damaged one takes no uuid away.

        Raise `RequestError` if the uuid is bound to another source.
        """
        with self._lock:
            UuidBindings.check(self, uuid, source, modality=modality, scope=scope)
            self._sources.put((scope, modality, uuid), source)

    def __len__(self) -> int:
        return len(self._sources)


def _make_refusal(uuid: str, modality: str) -> RequestError:
    return RequestError(f"uuid {uuid!r} was first used for another {modality}")


def check_uuid(uuid: object) -> str | None:
    """Return a uuid of a client, or raise `RequestError` if it can't be one."""
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH:
        raise RequestError(f"must be a string of 1 to {MAX_UUID_LENGTH} characters")
    return uuid


class SharedUuidBindings(UuidBindings):
    """The bindings of all frontends that share a store.

    A binding is an item of the store under a name of its own. The first frontend that puts it has
    bound the uuid, and it is evicted as other items are. What is bound in this process as well is
    not read from the store.
    """

    def __init__(self, store: ShmStore, hasher: MediaHasher) -> None:
        super().__init__()
        self._store = store
        self._hasher = hasher

    def get(self, uuid: str, *, modality: str, scope: UuidScope) -> BoundSource | None:
        name = self._hasher.name_uuid(uuid, modality, scope.cache_salt, scope.client)
        found = super().get(uuid, modality=modality, scope=scope)
        if found is not None:
            self._store.touch(name)  # it must not be evicted for others while it is used here
            return found
        entry = self._store.acquire(name)
        return None if entry is None else self._take(entry)

    def check(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        found = self.get(uuid, modality=modality, scope=scope)
        if found not in (None, source):
            raise _make_refusal(uuid, modality)

    def bind(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        super().check(uuid, source, modality=modality, scope=scope)
        name = self._hasher.name_uuid(uuid, modality, scope.cache_salt, scope.client)
        reference, is_found = self._store.put_or_find(_make_item(name, modality, source))
        if reference is not None:  # else there is no room, and it is bound in this process only
            entry = self._store.lease(reference) if is_found else None
            self._store.release(reference)
            if entry is not None and self._take(entry) != source:
                raise _make_refusal(uuid, modality)
        super().bind(uuid, source, modality=modality, scope=scope)

    def _take(self, entry: ShmEntry) -> BoundSource:
        """Return the binding, and give back its lease."""
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
