"""What callers' own names for media stand for.

A uuid is a promise of the caller, not an identity: it is bound to the source that it first came
with, and only within its salt. Bounded: the least recently used binding is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

from sensorium.types.errors import RequestError

MAX_UUID_LENGTH = 128
_Key = tuple[str | None, str, str]


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

    def get(self, uuid: str, *, modality: str, cache_salt: str | None) -> BoundSource | None:
        """Of a uuid that is known."""
        with self._lock:
            return self._sources.get((cache_salt, modality, uuid))

    def check(
        self, uuid: str, source: BoundSource, *, modality: str, cache_salt: str | None
    ) -> None:
        """Refuse a uuid that stands for something else."""
        with self._lock:
            self._check((cache_salt, modality, uuid), source)

    def bind(
        self, uuid: str, source: BoundSource, *, modality: str, cache_salt: str | None
    ) -> None:
        """Of a source that could be processed: a damaged one takes no uuid away. Refused as by
        `check`.
        """
        key = (cache_salt, modality, uuid)
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
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH:
        raise RequestError(f"a uuid is a text of 1 to {MAX_UUID_LENGTH} characters")
    return uuid
