"""An encoded media item as it came: a file's bytes, with room for their name."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class MediaBytes:
    """`digest` is filled by the hasher the first time that it is asked for; whoever keeps these
    bytes keeps it too, so that they are digested once.
    """

    data: bytes
    digest: str | None = field(default=None, repr=False)
