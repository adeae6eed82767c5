"""An encoded media item as it came: a file's bytes, with room for their name."""

from __future__ import annotations

from dataclasses import dataclass, field

from sensorium.types.errors import RequestError


@dataclass(slots=True)
class MediaBytes:
    """`digest` is filled by the hasher the first time that it is asked for; whoever keeps these
    bytes keeps it too, so that they are digested once.
    """

    data: bytes
    digest: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMedia:
    """What came of one item, and how long that took from the moment that its turn came."""

    outcome: MediaBytes | RequestError
    fetch_s: float
