"""What an item costs, found from its size alone: no pixel is computed.

The model's own processor is run on tensors of the meta device, which have a shape and no content.
So the answer is right whatever the options of a processor are called, and costs milliseconds even
where the tensors would not fit into memory. A processor that reads values gets a blank item, if
that is small enough.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sensorium.multimodal.limits import MediaLimits
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.multimodal import ProcessedItem

# Height and width of a picture; number, height and width of a video's frames.
Shape = tuple[int, ...]
_MAX_BLANK_PIXELS = 2**22
_RATIOS = (1.0, 2.0, 0.5, 16 / 9, 9 / 16, 8.0, 1 / 8)  # of height to width
_USUAL_EDGES = (56, 336, 1024)
_FPS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemCost:
    """What an encoder has to compute for an item, and what the prompt has to hold of it."""

    num_embeds: int = 0
    num_values: int = 0  # in all tensors of the item together

    def is_within(self, limit: ItemCost) -> bool:
        return self.num_embeds <= limit.num_embeds and self.num_values <= limit.num_values

    def join(self, other: ItemCost) -> ItemCost:
        """Return the larger of both, number by number."""
        return ItemCost(
            num_embeds=max(self.num_embeds, other.num_embeds),
            num_values=max(self.num_values, other.num_values),
        )


def get_cost(item: ProcessedItem) -> ItemCost:
    """Return the cost of an item that was processed."""
    return ItemCost(
        num_embeds=0 if item.layout is None else item.layout.num_embeds,
        num_values=sum(tensor.numel() for tensor in item.kwargs.values()),
    )


def measure(
    processor: MultiModalProcessor, modality: str, shape: Shape, processor_kwargs: Mapping[str, Any]
) -> ItemCost | None:
    """Return what a picture or video of this shape would cost with these options.

    `None` if the processor can't say: its options may be wrong, the item may be too thin, or a
    processor that reads values would have to read too many.
    """
    num_pixels = math.prod(shape)
    for device in ("meta", "cpu"):
        if device == "cpu" and num_pixels > _MAX_BLANK_PIXELS:
            return None
        *frames, height, width = shape
        media = torch.zeros((*frames, 3, height, width), dtype=torch.uint8, device=device)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the item itself will be warned about
                num_embeds, num_values = processor.count_item(
                    modality, media, _make_metadata(shape), processor_kwargs
                )
        except Exception:  # odd options make processors raise anything; they are refused later
            continue
        return ItemCost(num_embeds=num_embeds, num_values=num_values)
    return None


def _make_metadata(shape: Shape) -> dict[str, object] | None:
    if len(shape) == 2:
        return None
    num_frames, height, width = shape
    return {
        "total_num_frames": num_frames,
        "fps": _FPS,
        "width": width,
        "height": height,
        "duration": num_frames / _FPS,
        "frames_indices": list(range(num_frames)),
    }


def iter_image_shapes(limits: MediaLimits) -> Iterator[Shape]:
    """Yield sizes among which is one that costs most: small, usual and the largest, flat and
    tall.
    """
    for edge in _USUAL_EDGES:
        if edge**2 <= limits.max_pixels:
            yield edge, edge
    yield from (_fit(ratio, limits.max_pixels) for ratio in _RATIOS)


def iter_video_shapes(num_frames: int, limits: MediaLimits) -> Iterator[Shape]:
    """Yield sizes for a number of frames, in the same manner."""
    most = max(1, min(limits.max_pixels, limits.max_video_pixels // num_frames))
    edge = min(336, math.isqrt(most))
    yield num_frames, edge, edge
    yield from ((num_frames, *_fit(ratio, most)) for ratio in (1.0, 9 / 16, 16 / 9))


def _fit(ratio: float, max_pixels: int) -> tuple[int, int]:
    height = max(1, math.isqrt(int(max_pixels * ratio)))
    return height, max(1, max_pixels // height)
