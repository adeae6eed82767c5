"""Media items as a caller gives them, their options, and the limits on their size and source."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from sensorium.types.errors import FieldPath, RequestError
from sensorium.types.options import ALL_COMMANDS, MEDIA_COMMANDS, check_options, option


@dataclass(slots=True)
class MediaBytes:
    """The bytes of one encoded media file, such as a PNG, and their digest once it is computed."""

    data: bytes
    # Computed by the hasher when it is first needed. A cache of these bytes also keeps the digest.
    digest: str | None = field(default=None, repr=False)


class DeferredBytes(MediaBytes):
    """The bytes of a media file in another place, which `load` returns when they are first needed.

    The digest is given, so that an item in a cache is never loaded. `load` runs in the thread that
    first needs the bytes, and may raise a `RequestError`.
    """

    __slots__ = ("_load", "_loaded", "_lock")

    def __init__(self, digest: str, load: Callable[[], bytes]) -> None:
        self.digest = digest
        self._load = load
        self._loaded: bytes | None = None
        self._lock = Lock()

    @property
    def data(self) -> bytes:  # type: ignore[override]
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMedia:
    """The outcome of loading one media item: its bytes, or the error that prevented it."""

    outcome: MediaBytes | RequestError
    fetch_s: float  # the seconds of loading, from when this item's turn came


_ENCODED = (str, bytes, bytearray, memoryview, MediaBytes, os.PathLike)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """An image, a video or an audio clip of a request, as the caller gave it."""

    path: FieldPath  # the field of the request that has the item, for errors
    modality: str
    # A URL (`data:`, `http:`, `https:`, `file:`), a file's bytes, or a PIL image, array or tensor.
    # A path object is a file of a caller in this process. It never comes from a client.
    # None: the caller sent only a `uuid`, and expects the item to be in a cache.
    media: Any
    uuid: str | None = None

    @property
    def is_encoded(self) -> bool:
        return self.media is None or isinstance(self.media, _ENCODED)

    @property
    def is_remote(self) -> bool:
        """Return True if the media is an HTTP or HTTPS URL, which has to be fetched."""
        return isinstance(self.media, str) and self.media[:4].lower() == "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessingOptions:
    """The options of a request for decoding, processing and caching all its media items."""

    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the model's processor
    # Modality -> options of the decoder.
    media_io_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cache_salt: str | None = None  # items of different salts share nothing
    uuid_scope: str | None = None  # digest of the client: others may use the same uuids
    is_decoded_only: bool = False  # of audio: its samples are wanted, not the model's inputs


_MEBIBYTE = 2**20
_MEGAPIXEL = 10**6
_MAX_COUNT = 2**63 - 1  # what another process can be sent
_MAX_DEADLINE_S = 1e8  # three years; the system's clocks take little more
_count = partial(option, least=1, most=_MAX_COUNT)
_deadline = partial(option, above=0, most=_MAX_DEADLINE_S, metavar="SECONDS", commands=ALL_COMMANDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """The limits on a media item's size and work, and on where it may come from."""

    max_bytes: int = _count(
        256 * _MEBIBYTE,
        section="media",
        flag="--max-media-mb",
        unit=_MEBIBYTE,
        metavar="MIB",
        commands=MEDIA_COMMANDS,
        help="The size of an encoded item, wherever it comes from. The command line takes MiB.",
    )
    max_pixels: int = _count(
        100_000_000, help="The pixels of an image, or of one frame of a video."
    )
    # The default is the largest edge that JPEG and GIF can express.
    max_edge: int = _count(65_535, help="The width of an image, and its height.")
    max_frames: int = _count(2048, help="The frames that are kept of a video, after sampling.")
    max_video_pixels: int = _count(
        1_000_000_000, help="The pixels of all frames that are kept of a video."
    )
    max_decoded_pixels: int = _count(
        20_000_000_000,  # 1 to 2 minutes of work; 5 minutes of 1080p at 30 frames a second
        flag="--max-decoded-megapixels",
        unit=_MEGAPIXEL,
        metavar="N",
        commands=MEDIA_COMMANDS,
        help="The pixels of all frames that have to be decoded to get at those that are kept. A "
        "video with more is refused. The command line takes megapixels.",
    )
    max_duration_s: float = option(
        4 * 3600.0, above=0, most=math.inf, help="The length of audio or a video, in seconds."
    )
    deadline_s: float = _deadline(
        30.0,
        flag="--media-deadline",
        help="The time for fetching an item, from the first look-up to the last byte.",
    )
    request_deadline_s: float | None = _deadline(
        None,
        kind="number",
        flag="--media-request-deadline",
        default_text="twice that of one item",
        help="The time for fetching all items of one request together.",
    )
    process_deadline_s: float = _deadline(
        120.0,
        flag="--media-process-deadline",
        commands=MEDIA_COMMANDS,
        help="The time for decoding and processing an item, from the start of that work.",
    )
    process_wait_s: float = _deadline(
        120.0,
        flag="--media-process-wait",
        commands=MEDIA_COMMANDS,
        help="The time for which an item may wait until a process is free for it.",
    )
    max_process_bytes: int = _count(
        8 * 2**30, help="The memory that a process of the pool may take for an item."
    )
    max_redirects: int = option(
        5, least=0, most=_MAX_COUNT, help="The redirections that are followed for an item."
    )
    # The only hosts that may be asked. `example.com` means that host alone; `.example.com` and
    # `*.example.com` mean all below it. Empty: any public host.
    allowed_domains: frozenset[str] = field(default_factory=frozenset)
    allowed_local_path: Path | None = None  # files below it may be read
    allow_private_addresses: bool = option(
        False,
        flag="--allow-private-media-addresses",
        commands=ALL_COMMANDS,
        help="Also fetch from loopback, private and link-local networks.",
    )

    def __post_init__(self) -> None:
        check_options(self, label="media limits: ")

    @property
    def flight_timeout_s(self) -> float:
        """Return how long a request waits for the processing of an item, in seconds.

        That is the time of two attempts, because an item is tried again if its worker ends.
        """
        return 2 * (self.process_wait_s + self.process_deadline_s)

    def get_request_deadline_s(self) -> float:
        """Return the seconds for fetching a request's media, by default twice one item's."""
        return 2 * self.deadline_s if self.request_deadline_s is None else self.request_deadline_s
