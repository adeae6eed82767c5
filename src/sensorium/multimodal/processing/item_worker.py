"""Decodes and processes one item at a time, wherever that runs: in the frontend or in a pool.

Owns the model's processor there, which is not safe to use from two threads. Refuses items that a
request's options make too large, and sounds of which the model would not hear the end.
"""

from __future__ import annotations

import math
from threading import Lock
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from sensorium.multimodal.decoding.decoding import decode
from sensorium.multimodal.decoding.guards import WorkBudget
from sensorium.multimodal.decoding.images import read_image_size
from sensorium.multimodal.decoding.video import ChooseFrames, make_frame_chooser
from sensorium.multimodal.limits import MediaLimits
from sensorium.multimodal.processing.cost_guard import CostCheck, CostGuard, OwnOptions
from sensorium.multimodal.processing.hearing import Hearing
from sensorium.multimodal.processing.item_cost import Shape
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.multimodal.processing.stage_times import StageTimes
from sensorium.types.multimodal import ProcessedItem
from sensorium.types.times import ItemTimes


class ItemJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done with an item, beside its media. `decode_options`: `None` for media that
    came decoded.
    """

    mm_hash: str
    modality: str
    decode_options: dict[str, Any] | None
    processor_kwargs: dict[str, Any]


class ItemWorker:
    """A worker that processes items. With `own_options`, the server's, no options of a request may
    make an item larger than these can; without them any that the processor takes may.
    """

    def __init__(
        self,
        processor: MultiModalProcessor,
        limits: MediaLimits,
        own_options: OwnOptions | None = None,
    ) -> None:
        self._processor = processor
        self.limits = limits
        self._guard = None if own_options is None else CostGuard(processor, limits, own_options)
        self._hearing = Hearing(processor)
        self._lock = Lock()

    def process(
        self, job: ItemJob, media: object, *, max_cost_s: float = math.inf
    ) -> tuple[ProcessedItem, ItemTimes]:
        """The item, and how long its stages took. `media`: the bytes of a file, or what a caller
        in process may give. A `RequestError` if it can't be done. `CostlyItemError` if decoding it
        is more work than `max_cost_s`, as soon as that is seen.
        """
        times = StageTimes()
        check = None
        if self._guard is not None:
            check = self._guard.make_check(job.modality, job.processor_kwargs, job.decode_options)
        if isinstance(media, bytes):
            with times.measure("decode"):
                media = self._decode(job, media, check, max_cost_s)
        elif check is not None:
            self._check_shape(check, _get_shape(job.modality, media))
        with self._lock, times.measure("process"):
            item = self._process(job, media, check)
        return item, times.get()

    def _decode(
        self, job: ItemJob, data: bytes, check: CostCheck | None, max_cost_s: float
    ) -> object:
        options = job.decode_options or {}
        if check is not None and job.modality == "image":
            size = read_image_size(data, limits=self.limits)
            self._check_shape(check, None if size is None else (size[1], size[0]))
        media, metadata = decode(
            job.modality,
            data,
            options,
            limits=self.limits,
            sampling_rate=self._processor.sampling_rate,
            choose_frames=self._make_choice(options, check),
            budget=WorkBudget(max_cost_s=max_cost_s, deadline_s=self.limits.process_deadline_s),
        )
        return media if metadata is None else (media, metadata)

    def _make_choice(self, options: dict[str, Any], check: CostCheck | None) -> ChooseFrames | None:
        video_processor = self._processor.video_processor
        if video_processor is None:
            return None
        choose_frames = make_frame_chooser(video_processor, options)
        return choose_frames if check is None else check.check_frames(choose_frames, self._lock)

    def _check_shape(self, check: CostCheck, shape: Shape | None) -> None:
        if shape is not None:
            with self._lock:
                check.check_shape(shape)

    def _process(self, job: ItemJob, media: object, check: CostCheck | None) -> ProcessedItem:
        if job.modality == "audio":
            samples, _ = self._processor.check_media("audio", media, job.processor_kwargs)
            self._hearing.check(len(samples), job.processor_kwargs)  # type: ignore[arg-type]
            media = samples
        item = self._processor.process_item(
            job.modality, media, job.processor_kwargs, mm_hash=job.mm_hash
        )
        if check is not None:
            check.check_result(
                item, lambda own: self._processor.process_item(job.modality, media, own)
            )
        return item


def _get_shape(modality: str, media: object) -> Shape | None:
    """Return the shape of decoded pictures; `None` for what is no such thing, or no picture."""
    if isinstance(media, tuple) and len(media) == 2:
        media = media[0]  # beside it: what is known of its frames
    if modality == "image" and isinstance(media, Image.Image):
        return media.height, media.width
    if modality == "video" and isinstance(media, list | tuple) and media:
        size = _get_shape("image", media[0])
        return None if size is None else (len(media), *size)
    num_dimensions = 3 if modality == "image" else 4
    if modality == "audio" or not isinstance(media, np.ndarray | torch.Tensor):
        return None
    shape = tuple(media.shape)
    if modality == "image" and len(shape) == 2:
        return shape
    if len(shape) != num_dimensions:
        return None
    *frames, first, second, third = shape
    # Colours come first or last.
    return (*frames, first, second) if third <= first else (*frames, second, third)
