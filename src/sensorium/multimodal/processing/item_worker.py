"""Decodes and processes one item at a time, in the frontend or in a process of the pool.

Owns the model's processor, which is not safe to use from two threads. Refuses items that a
request's options make too large, and audio that is longer than the model's window.

Processors cut off audio that is longer than their window, without an error. The length of the
window has no common name among their settings, so it is found by trials: if a change at the end of
the audio does not change the result, that end was cut off. The trials use audio that is made here,
so that no client's audio influences another client's.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
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
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.processing.checks import NUM_DIMENSIONS, get_array_shape
from sensorium.multimodal.processing.cost_guard import CostCheck, CostGuard, OwnOptions, Shape
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ItemLayout, ItemTimes, ProcessedItem
from sensorium.utils.lru import LruCache


class StageTimes:
    """A stopwatch for one thread that sums up the seconds of each stage of a media item."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time that the `with` block takes to a stage, even if the block fails."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add({stage: time.monotonic() - began})

    def add(self, times: ItemTimes) -> None:
        """Add the seconds of stages that were measured elsewhere."""
        self._seconds = add_times(self._seconds, times)

    def get(self) -> ItemTimes:
        return dict(self._seconds)


def add_times(first: ItemTimes, second: ItemTimes) -> dict[str, float]:
    """Return the sum of two mappings from stages to seconds, stage by stage."""
    stages = {**first, **second}
    return {stage: first.get(stage, 0.0) + second.get(stage, 0.0) for stage in stages}


# The end of audio that may be ignored: less than a syllable, and more than the padding of codecs.
_TOLERANCE_S = 0.05
_MAX_OPTION_SETS = 64
_USUAL_WINDOW_S = 60
SAMPLES = "samples"  # the tensor of audio that was only decoded: mono, at the model's rate


@dataclass(slots=True)
class _Window:
    """The bounds found so far on the longest audio, in samples, that a processor takes whole."""

    processor_kwargs: Mapping[str, Any]
    accepted: int = 0  # the longest audio that was not cut off
    rejected: int | None = None  # the shortest audio that was cut off; `None` if none was
    is_exact: bool = False  # audio longer than `accepted` plus the tolerance is cut off

    def excludes(self, num_samples: int) -> bool:
        """Return True if audio of this length, which is above `accepted`, is certainly cut off."""
        return self.is_exact or (self.rejected is not None and num_samples >= self.rejected)


class LengthCheck:
    """A check, for one thread, whether the model's processor would cut off the end of audio."""

    def __init__(self, processor: MultiModalProcessor) -> None:
        self._processor = processor
        self._rate = processor.sampling_rate or 1
        self._num_tolerated = int(_TOLERANCE_S * self._rate)
        self._windows: LruCache[str, _Window] = LruCache(_MAX_OPTION_SETS)  # by options

    def check(self, num_samples: int, processor_kwargs: Mapping[str, Any]) -> None:
        """Raise `RequestError` if the processor would cut off more than the last 0.05 s."""
        if self._processor.takes_whole_audio:
            return
        key = repr(sorted(processor_kwargs.items()))
        window = self._windows.get(key) or _Window(processor_kwargs)
        self._windows.put(key, window)
        num_needed = num_samples - self._num_tolerated
        if num_needed > window.accepted and not window.excludes(num_needed):
            self._explore(window, num_samples)
        if num_needed <= window.accepted:
            return
        limit = "this model would cut off its end"
        if window.is_exact:
            limit = f"this model takes at most {window.accepted / self._rate:.4g} s"
        raise RequestError(
            f"the audio is {num_samples / self._rate:.4g} s long; {limit}: send it in pieces"
        )

    def _explore(self, window: _Window, num_samples: int) -> None:
        """Find out by trials if the processor takes audio of this length, and where its limit is.

        The limit is usually at most a minute, and one of the numbers among the processor's
        settings. So the longest such number is tried first. Then most audio needs no further trial,
        and very long audio no trial at its own length. The results are stored in `window`.
        """
        usual = _USUAL_WINDOW_S * self._rate
        candidates = sorted({c for c in self._iter_candidates() if c <= max(num_samples, usual)})
        for length in [c for c in candidates if c <= usual][-1:]:
            self._is_taken(window, length)
        known = [window.accepted] if window.accepted in candidates else []
        if num_samples <= window.accepted or self._ends_at_one_of(known, window):
            return
        if not self._is_taken(window, num_samples):
            self._ends_at_one_of([c for c in reversed(candidates) if c < num_samples], window)

    def _ends_at_one_of(self, lengths: Iterable[int], window: _Window) -> bool:
        for length in lengths:
            beyond = length + 2 * self._num_tolerated
            if self._is_taken(window, length) and not self._is_taken(window, beyond):
                window.is_exact = True
                return True
        return False

    def _is_taken(self, window: _Window, num_samples: int) -> bool:
        """Return True if the processor takes audio of this length whole; try it if needed."""
        if num_samples > window.accepted and not window.excludes(num_samples):
            if self._ask(num_samples, window.processor_kwargs):
                window.accepted = num_samples
            else:
                window.rejected = num_samples
        return num_samples <= window.accepted

    def _ask(self, num_samples: int, processor_kwargs: Mapping[str, Any]) -> bool:
        """Return True if the processor's result depends on the last part of audio of this length.

        Return True also if the processor fails, because it will then fail for the client's audio in
        the same way.
        """
        num_changed = min(num_samples, self._num_tolerated)
        silence = np.zeros(num_samples, dtype=np.float32)
        loud = silence.copy()
        loud[-num_changed:] = np.random.default_rng(0).uniform(-0.5, 0.5, num_changed)
        try:
            first, second = (
                self._processor.process_item("audio", audio, processor_kwargs).kwargs
                for audio in (silence, loud)
            )
        except RequestError:
            return True
        return any(not torch.equal(first[name], second[name]) for name in first)

    def _iter_candidates(self) -> Iterator[int]:
        """Yield lengths in samples at which the processor may cut audio off.

        They are all positive numbers among its settings and defaults, as samples and as seconds.
        """
        processor = self._processor.hf_processor
        part = getattr(processor, "feature_extractor", None)
        values = [*vars(processor).values()]
        if part is not None:
            values += vars(part).values()
            values += [p.default for p in inspect.signature(part.__call__).parameters.values()]
        for value in values:
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if is_number and math.isfinite(value) and value > 0:
                yield int(value)
                yield int(value * self._rate)


class ItemJob(msgspec.Struct, frozen=True, kw_only=True):
    """The instructions for processing one media item, which is passed separately."""

    mm_hash: str
    modality: str
    decode_options: dict[str, Any] | None  # None: the media is decoded already
    processor_kwargs: dict[str, Any]
    is_decoded_only: bool = False  # the result is the samples of audio, as the tensor `SAMPLES`


class ItemWorker:
    """A worker that decodes and processes media items with the model's processor.

    With `own_options` (the server's options) it refuses an item if the options of its request make
    it larger than the server's options can. Without them a request may use any options.
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
        self._length_check = LengthCheck(processor)
        self.lock = Lock()

    def process(
        self, job: ItemJob, media: object, *, max_cost_s: float = math.inf
    ) -> tuple[ProcessedItem, ItemTimes]:
        """Return the processed item, and the seconds that its stages took.

        `media` is the bytes of a file, or decoded media from a caller in process. Raise
        `RequestError` if the media can't be processed, and `CostlyItemError` as soon as decoding
        turns out to be more work than `max_cost_s` seconds.
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
        with self.lock, times.measure("process"):
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
        return choose_frames if check is None else check.check_frames(choose_frames, self.lock)

    def _check_shape(self, check: CostCheck, shape: Shape | None) -> None:
        if shape is not None:
            with self.lock:
                check.check_shape(shape)

    def _process(self, job: ItemJob, media: object, check: CostCheck | None) -> ProcessedItem:
        if job.modality == "audio":
            samples: Any = self._processor.check_media("audio", media, job.processor_kwargs)[0]
            if job.is_decoded_only:
                return _make_samples_item(job.mm_hash, samples)
            self._length_check.check(len(samples), job.processor_kwargs)
            media = samples
        item = self._processor.process_item(
            job.modality, media, job.processor_kwargs, mm_hash=job.mm_hash
        )
        if check is not None:
            check.check_result(
                item, lambda own: self._processor.process_item(job.modality, media, own)
            )
        return item


def _make_samples_item(mm_hash: str, samples: np.ndarray[Any, Any]) -> ProcessedItem:
    """Return samples of audio as an item, with a layout that no prompt can use."""
    layout = ItemLayout(text="", token_id=0, num_embeds=0)
    tensors = {SAMPLES: torch.from_numpy(samples)}
    return ProcessedItem(modality="audio", mm_hash=mm_hash, kwargs=tensors, layout=layout)


def _get_shape(modality: str, media: object) -> Shape | None:
    """Return the shape of a decoded image or video, or `None` for audio and unknown forms."""
    if isinstance(media, tuple) and len(media) == 2:
        media = media[0]  # the second entry is the metadata of its frames
    if modality == "image" and isinstance(media, Image.Image):
        return media.height, media.width
    if modality == "video" and isinstance(media, list | tuple) and media:
        size = _get_shape("image", media[0])
        return None if size is None else (len(media), *size)
    if modality == "audio" or not isinstance(media, np.ndarray | torch.Tensor):
        return None
    is_known = media.ndim in NUM_DIMENSIONS[modality]
    return get_array_shape(modality, media) if is_known else None
