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

from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.hasher import MediaHasher
from sensorium.multimodal.item_codec import as_bytes
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalKwargsItem, ProcessedItem
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
        bound = self.get(uuid, modality=modality, scope=scope)
        _check_same(uuid, modality, source, bound)

    def bind(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        """Bind the uuid to a source that was processed: a damaged one takes no uuid away.

        Raise `RequestError` if the uuid is bound to another source.
        """
        key = scope, modality, uuid
        with self._lock:
            _check_same(uuid, modality, source, self._sources.get(key))
            self._sources.put(key, source)


def _check_same(uuid: str, modality: str, source: BoundSource, bound: BoundSource | None) -> None:
    if bound not in (None, source):
        raise RequestError(f"uuid {uuid!r} was first used for another {modality}")


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
    bound the uuid, and it is evicted as other items are.
    """

    def __init__(self, store: ShmStore, hasher: MediaHasher) -> None:
        super().__init__()
        self._store = store
        self._hasher = hasher

    def get(self, uuid: str, *, modality: str, scope: UuidScope) -> BoundSource | None:
        # Also if it is bound in this process: a use keeps it in the store for other frontends.
        stored = self._store.copy_item(self._name(uuid, modality, scope))
        found = super().get(uuid, modality=modality, scope=scope)
        return _read_item(stored) if found is None and stored is not None else found

    def bind(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        found = super().get(uuid, modality=modality, scope=scope)
        _check_same(uuid, modality, source, found)
        name = self._name(uuid, modality, scope)
        reference = self._store.put(_make_item(name, modality, source))
        if reference is not None:  # else there is no room, and it is bound in this process only
            try:
                bound = _read_item(self._store.open(reference))
            finally:
                self._store.release(reference)
            _check_same(uuid, modality, source, bound)
        super().bind(uuid, source, modality=modality, scope=scope)

    def _name(self, uuid: str, modality: str, scope: UuidScope) -> str:
        return self._hasher.name_uuid(uuid, modality, scope.cache_salt, scope.client)


def _make_item(name: str, modality: str, source: BoundSource) -> ProcessedItem:
    digest = torch.tensor(list(source.digest.encode()), dtype=torch.uint8)
    kwargs = {_DIGEST: digest, _IS_ENCODED: torch.tensor(source.is_encoded)}
    return ProcessedItem(modality=modality, mm_hash=name, kwargs=kwargs, layout=None)


def _read_item(kwargs: MultiModalKwargsItem) -> BoundSource:
    digest = bytes(as_bytes(kwargs[_DIGEST]).tolist()).decode()
    return BoundSource(digest=digest, is_encoded=bool(kwargs[_IS_ENCODED].item()))
