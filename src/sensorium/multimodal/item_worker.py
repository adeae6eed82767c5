"""Decodes and processes one item at a time, wherever that runs: in the frontend or in a pool.

Owns the model's processor there, which is not safe to use from two threads.
"""

from __future__ import annotations

import math
from threading import Lock
from typing import Any

import msgspec

from sensorium.multimodal.media.decoding import decode
from sensorium.multimodal.media.frame_sampling import make_frame_chooser
from sensorium.multimodal.media.limits import MediaLimits
from sensorium.multimodal.media.work_budget import WorkBudget
from sensorium.multimodal.processor import MultiModalProcessor
from sensorium.multimodal.stage_times import StageTimes
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
    def __init__(self, processor: MultiModalProcessor, limits: MediaLimits) -> None:
        self._processor = processor
        self.limits = limits
        self._lock = Lock()

    def process(
        self, job: ItemJob, media: object, *, max_cost_s: float = math.inf
    ) -> tuple[ProcessedItem, ItemTimes]:
        """The item, and how long its stages took. `media`: the bytes of a file, or what a caller
        in process may give. A `RequestError` if it can't be done. `CostlyItemError` if decoding it
        is more work than `max_cost_s`, as soon as that is seen.
        """
        times = StageTimes()
        if isinstance(media, bytes):
            with times.measure("decode"):
                media = self._decode(job, media, max_cost_s)
        with self._lock, times.measure("process"):
            item = self._processor.process_item(
                job.modality, media, job.processor_kwargs, mm_hash=job.mm_hash
            )
        return item, times.get()

    def _decode(self, job: ItemJob, data: bytes, max_cost_s: float) -> object:
        options = job.decode_options or {}
        video_processor = self._processor.video_processor
        media, metadata = decode(
            job.modality,
            data,
            options,
            limits=self.limits,
            sampling_rate=self._processor.sampling_rate,
            choose_frames=None
            if video_processor is None
            else make_frame_chooser(video_processor, options),
            budget=WorkBudget(max_cost_s=max_cost_s, deadline_s=self.limits.process_deadline_s),
        )
        return media if metadata is None else (media, metadata)
