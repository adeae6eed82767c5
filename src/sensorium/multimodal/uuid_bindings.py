"""What callers' own names for media stand for.

A uuid is a promise of the caller, not an identity: it is bound to the digest of the source that it
first came with, and only within its salt. Bounded: the least recently used binding is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from sensorium.types.errors import RequestError

MAX_UUID_LENGTH = 128
_Key = tuple[str | None, str, str]


class UuidBindings:
    def __init__(self, max_entries: int = 65_536) -> None:
        self._max_entries = max_entries
        self._digests: OrderedDict[_Key, str] = OrderedDict()
        self._lock = Lock()

    def get(self, uuid: str, *, modality: str, cache_salt: str | None) -> str | None:
        """The digest of the source, if the uuid is known."""
        with self._lock:
            return self._digests.get((cache_salt, modality, uuid))

    def bind(self, uuid: str, digest: str, *, modality: str, cache_salt: str | None) -> None:
        """Refused if the uuid stands for something else already."""
        key = (cache_salt, modality, uuid)
        with self._lock:
            if self._digests.setdefault(key, digest) != digest:
                raise RequestError(f"uuid {uuid!r} was first used for another {modality}")
            self._digests.move_to_end(key)
            if len(self._digests) > self._max_entries:
                self._digests.popitem(last=False)

    def __len__(self) -> int:
        return len(self._digests)


def check_uuid(uuid: object) -> str | None:
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH:
        raise RequestError(f"a uuid is a text of 1 to {MAX_UUID_LENGTH} characters")
    return uuid
