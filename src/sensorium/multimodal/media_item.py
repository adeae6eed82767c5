"""Media items as a caller gives them, and the options that a request has for all its items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sensorium.types.errors import FieldPath, RequestError


@dataclass(slots=True)
class MediaBytes:
    """An encoded item: the bytes of a file."""

    data: bytes
    # Filled by the hasher when it is first needed. A cache that keeps these bytes keeps it, too.
    digest: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMedia:
    """What came of one item, and how long that took from the moment that its turn came."""

    outcome: MediaBytes | RequestError
    fetch_s: float


_ENCODED = (str, bytes, bytearray, memoryview, MediaBytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """An item of a request."""

    path: FieldPath  # where it stands in its prompt, for errors
    modality: str
    # A URL (`data:`, `http:`, `https:`, `file:`), a file's bytes, or a PIL image, array or tensor.
    # None: the caller expects a cache to have it, under `uuid`.
    media: Any
    uuid: str | None = None

    @property
    def is_encoded(self) -> bool:
        return self.media is None or isinstance(self.media, _ENCODED)

    @property
    def is_remote(self) -> bool:
        """Return True if it has to be fetched over the network."""
        return isinstance(self.media, str) and self.media[:4].lower() == "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class PerceptionOptions:
    """The options that a request has for all its items."""

    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the model's processor
    # Modality -> options of the decoder.
    media_io_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cache_salt: str | None = None  # items of different salts share nothing
    uuid_scope: str | None = None  # digest of the client: others may use the same uuids
