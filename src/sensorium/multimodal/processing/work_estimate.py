"""How much work an item will be, as far as that is seen without decoding anything.

Runs in the process that serves requests, so it reads a few bytes at most. What only FFmpeg can
see (how many frames a video has, how long a sound is) is found by the process that decodes it.
"""

from __future__ import annotations

import math
from typing import Any

from PIL import Image

from sensorium.multimodal.decoding.guards import estimate_frames_s, estimate_sound_s
from sensorium.multimodal.decoding.images import check_num_pixels, read_header_size
from sensorium.multimodal.limits import MediaLimits
from sensorium.multimodal.media_bytes import MediaBytes

_UNKNOWN_RATE = 16_000  # samples a second; the rate does not matter for an estimate


def estimate_cost_s(modality: str, media: object, limits: MediaLimits) -> float | None:
    """Return the seconds of work that an item will be; `None` if only a decoder can see it.

    Raise `RequestError` for a picture that is larger than the limits allow, by its header.
    """
    if isinstance(media, MediaBytes):
        size = read_header_size(media.data) if modality == "image" else None
        if size is None:
            return None
        check_num_pixels(*size, limits)
        return estimate_frames_s(1, *size)
    if isinstance(media, tuple) and len(media) == 2:
        media = media[0]  # beside it: a rate, or what is known of frames
    num_values = _count_values(media)
    if modality == "audio":
        return estimate_sound_s(num_values / _UNKNOWN_RATE)
    return estimate_frames_s(1, num_values // 3, 1)


def _count_values(media: Any) -> int:
    """Count the numbers that media in process consists of; 0 for what is no such media."""
    if isinstance(media, list | tuple):
        return sum(map(_count_values, media))
    if isinstance(media, Image.Image):
        return 3 * media.width * media.height
    shape = getattr(media, "shape", None)
    return math.prod(shape) if isinstance(shape, tuple) else 0
