"""What a caller gives as an item of media, and what a request says of all its items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sensorium.multimodal.media_bytes import MediaBytes
from sensorium.types.errors import FieldPath

_ENCODED = (str, bytes, bytearray, memoryview, MediaBytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """`media`: an address (`data:`, `http:`, `https:`, `file:`), a file's bytes, or a PIL image,
    array or tensor; `None`: the caller believes that a cache has it, under `uuid`.
    """

    path: FieldPath  # where it stands in its prompt, for errors
    modality: str
    media: Any
    uuid: str | None = None

    @property
    def is_encoded(self) -> bool:
        return self.media is None or isinstance(self.media, _ENCODED)

    @property
    def is_remote(self) -> bool:
        """Getting it costs more than a look into memory."""
        return isinstance(self.media, str) and self.media[:4].lower() == "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class PerceptionOptions:
    """`processor_kwargs` go to the model's processor with every item, `media_io_kwargs` (by
    modality) to the decoders. Items of different salts share nothing. `uuid_scope`: a digest of
    the client; uuids of different clients stand for different items.
    """

    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    media_io_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cache_salt: str | None = None
    uuid_scope: str | None = None
