"""How much of a machine one media item may cost, and where it may come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sensorium.types.errors import ModelError

_MEBIBYTE = 2**20
_MAX_COUNT = 2**63 - 1  # that goes to other processes
_MAX_DEADLINE_S = 1e8  # three years; the system's clocks take little more
_COUNTS = {
    "max_bytes": 1,
    "max_pixels": 1,
    "max_edge": 1,
    "max_frames": 1,
    "max_video_pixels": 1,
    "max_decoded_pixels": 1,
    "max_process_bytes": 1,
    "max_redirects": 0,
}
_TIMES = {
    "max_duration_s": float("inf"),
    "deadline_s": _MAX_DEADLINE_S,
    "request_deadline_s": _MAX_DEADLINE_S,
    "process_deadline_s": _MAX_DEADLINE_S,
    "process_wait_s": _MAX_DEADLINE_S,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Limits on one media item, safe by default: no local files, no private addresses."""

    max_bytes: int = 256 * _MEBIBYTE  # of an encoded item, wherever it comes from
    max_pixels: int = 100_000_000  # of an image, or of one frame
    # Of its width and of its height: the largest that JPEG and GIF can express.
    max_edge: int = 65_535
    max_frames: int = 2048  # that are kept of a video, after sampling
    max_video_pixels: int = 1_000_000_000  # of all frames that are kept
    # Of all frames that have to be decoded to get at those: 1 to 2 minutes of work, or 5 minutes of
    # 1080p at 30 fps.
    max_decoded_pixels: int = 20_000_000_000
    max_duration_s: float = 4 * 3600.0  # of a sound or a video
    deadline_s: float = 30.0  # for fetching an item, from the first look-up to the last byte
    # For fetching all items of one request together; None: twice `deadline_s`.
    request_deadline_s: float | None = None
    process_deadline_s: float = 120.0  # for decoding and processing an item, from the start of that
    process_wait_s: float = 120.0  # for waiting until a process is free for an item
    max_process_bytes: int = 8 * 2**30  # that a process of the pool may take for an item
    max_redirects: int = 5
    # The only hosts that may be asked: `example.com` alone, `.example.com` or `*.example.com` for
    # all below it. None named: any public host.
    allowed_domains: frozenset[str] = field(default_factory=frozenset)
    allowed_local_path: Path | None = None  # files below it may be read
    # Loopback, private and link-local networks may be asked.
    allow_private_addresses: bool = False

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= _MAX_COUNT:
                raise ModelError(f"media limits: {name} must be an integer >= {least}")
        for name, most in _TIMES.items():
            value = getattr(self, name)
            if value is None and name == "request_deadline_s":
                continue
            if type(value) not in (int, float) or not 0 < value <= most:
                raise ModelError(f"media limits: {name} must be a number above 0, {most:g} at most")

    @property
    def flight_timeout_s(self) -> float:
        """Return the longest time for an item: it may wait and be worked on twice."""
        return 2 * (self.process_wait_s + self.process_deadline_s)

    def get_request_deadline_s(self) -> float:
        """Return the seconds in which all media of one request must have been fetched."""
        return 2 * self.deadline_s if self.request_deadline_s is None else self.request_deadline_s
