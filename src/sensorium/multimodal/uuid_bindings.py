"""What callers' own names for media stand for.

A uuid is a promise of the caller, not an identity: it is bound to the source that it first came
with, and only within its scope: what one client names, no other client reads or blocks. Bounded:
the least recently used binding is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from sensorium.types.errors import RequestError

MAX_UUID_LENGTH = 128


class UuidScope(NamedTuple):
    """Those who share what a uuid stands for."""

    client: str | None = None  # digest of an API key; `None`: all clients that have none
    cache_salt: str | None = None  # of the request


_Key = tuple[UuidScope, str, str]  # scope, modality, uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSource:
    """`is_encoded`: it was a file, not pixels or samples in process."""

    digest: str
    is_encoded: bool


class UuidBindings:
    def __init__(self, max_entries: int = 65_536) -> None:
        self._max_entries = max_entries
        self._sources: OrderedDict[_Key, BoundSource] = OrderedDict()
        self._lock = Lock()

    def get(self, uuid: str, *, modality: str, scope: UuidScope) -> BoundSource | None:
        """Return the source of a uuid that is known, and keep it for longer."""
        key = (scope, modality, uuid)
        with self._lock:
            source = self._sources.get(key)
            if source is not None:
                self._sources.move_to_end(key)
            return source

    def check(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        """Refuse a uuid that stands for something else."""
        with self._lock:
            self._check((scope, modality, uuid), source)

    def bind(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        """Of a source that could be processed: a damaged one takes no uuid away. Refused as by
        `check`.
        """
        key = (scope, modality, uuid)
        with self._lock:
            self._check(key, source)
            self._sources[key] = source
            self._sources.move_to_end(key)
            if len(self._sources) > self._max_entries:
                self._sources.popitem(last=False)

    def _check(self, key: _Key, source: BoundSource) -> None:
        if self._sources.get(key, source) != source:
            raise refuse_uuid(key[2], key[1])

    def __len__(self) -> int:
        return len(self._sources)


def refuse_uuid(uuid: str, modality: str) -> RequestError:
    return RequestError(f"uuid {uuid!r} was first used for another {modality}")


def check_uuid(uuid: object) -> str | None:
    """Return a caller's uuid, or raise a `RequestError` if it can't be one."""
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH:
        raise RequestError(f"must be a string of 1 to {MAX_UUID_LENGTH} characters")
    return uuid
