"""Refuses options of a request that ask too much of the model's processor.

A processor enlarges an image to any size that its options ask for: a small image with a large
number in an option could take all memory of a machine. Names and numbers of options are checked
before anything else is done.

Then items are refused that a request's options make larger than the server's own options can. An
item may cost as much as it would with the server's own options, or as much as the largest allowed
item would with them. The cost is estimated from the item's size before decoding, and checked again
after processing.

For the estimate the model's own processor runs on tensors of the meta device, which have a shape
and no content. That takes milliseconds, even if the tensors would not fit into memory. A processor
that reads the values of pixels gets a blank item, if that is small enough.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from threading import Lock
from typing import Any

import msgspec
import torch

from sensorium.multimodal.decoding.decoding import resolve_options
from sensorium.multimodal.decoding.video import (
    ChooseFrames,
    Metadata,
    make_frame_chooser,
    make_metadata,
)
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ProcessedItem

# Arguments of a processor that the server sets itself: media, and the form of results.
_RESERVED = frozenset(
    {
        "text",
        "images",
        "videos",
        "audio",
        "device",
        "raw_speech",
        "video_metadata",
        "load_audio_backend",
        "return_tensors",
        "return_text_replacement_offsets",
        "return_metadata",
        "return_mm_token_type_ids",
    }
)
MAX_EDGE = 8192
MAX_PIXELS = 2**25  # twice the largest image of the Qwen-VL families
# Part of an option's name -> the largest number that the option may have. Some of these options are
# lengths of edges, and some say how many parts one image is split into. The processor's own value
# is always allowed.
_MOST = {
    "pinpoints": MAX_EDGE,
    "crops": 64,
    "patches": 64,
    "frames": 2048,
    "tokens": 16_384,
    "length": MAX_PIXELS,
    "multiple": MAX_PIXELS,
    "rate": 2**20,
}
_MOST_OF_OTHERS = 256  # for example for values of colours
_MAX_DEPTH = 8
_PATH = ("mm_processor_kwargs",)


def check_processor_kwargs(
    processor: MultiModalProcessor, processor_kwargs: Mapping[str, Any]
) -> None:
    """Raise `RequestError` if processor options are unknown or have too large numbers."""
    known = processor.option_names
    for name, value in processor_kwargs.items():
        if not isinstance(name, str):
            raise RequestError(f"option names are text, not {name!r}", path=_PATH)
        if name in _RESERVED or (known and name not in known):
            takes = ", ".join(sorted(known - _RESERVED))
            raise RequestError(f"unknown option {name!r} (known: {takes})", path=_PATH)
        for path, number in _walk(name, value, depth=0):
            most = _get_most(path, processor)
            if not abs(number) <= most:  # NaN is also refused
                raise RequestError(f"{path} may be {most} at most", path=_PATH)


def _walk(path: str, value: Any, *, depth: int) -> Iterator[tuple[str, float]]:
    """Yield all numbers in an option's value, each with a path such as `size.longest_edge`."""
    if depth > _MAX_DEPTH:
        raise RequestError(
            f"{path} is nested too deeply: at most {_MAX_DEPTH} levels are allowed", path=_PATH
        )
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _walk(f"{path}.{key}", entry, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _walk(path, entry, depth=depth + 1)
    elif isinstance(value, Real) and not isinstance(value, bool):  # also numpy's
        yield path, value  # type: ignore[misc]


def _get_most(path: str, processor: MultiModalProcessor) -> float:
    own = processor.get_option_default(path)
    if "pixels" in path:
        return MAX_PIXELS
    if "size" in path:  # some processors count pixels under the name of an edge
        return MAX_PIXELS if own is not None and own > MAX_EDGE else MAX_EDGE
    most = next((most for part, most in _MOST.items() if part in path), _MOST_OF_OTHERS)
    return most if own is None else max(most, own)


# Height and width of an image; number, height and width of a video's frames.
Shape = tuple[int, ...]
_MAX_BLANK_PIXELS = 2**22
_RATIOS = (1.0, 2.0, 0.5, 16 / 9, 9 / 16, 8.0, 1 / 8)  # of height to width
_USUAL_EDGES = (56, 336, 1024)
_FPS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemCost:
    """The size of a processed media item, which decides how much memory and work it takes."""

    num_embeds: int = 0  # in a prompt
    num_values: int = 0  # in all tensors of the item, which the encoder reads

    def is_within(self, limit: ItemCost) -> bool:
        return self.num_embeds <= limit.num_embeds and self.num_values <= limit.num_values

    def join(self, other: ItemCost) -> ItemCost:
        """Return the maximum of both costs, separately for embeddings and values."""
        return ItemCost(
            num_embeds=max(self.num_embeds, other.num_embeds),
            num_values=max(self.num_values, other.num_values),
        )


def get_cost(item: ProcessedItem) -> ItemCost:
    return ItemCost(
        num_embeds=0 if item.layout is None else item.layout.num_embeds,
        num_values=sum(tensor.numel() for tensor in item.kwargs.values()),
    )


def measure(
    processor: MultiModalProcessor, modality: str, shape: Shape, processor_kwargs: Mapping[str, Any]
) -> ItemCost | None:
    """Return the estimated cost of an image or a video of this shape, without its content.

    The model's processor runs on an empty item of this shape. Return `None` if it fails: the
    options may be wrong, the item may be too thin, or the processor reads values and the item is
    too large for that.
    """
    *frames, height, width = shape
    metadata: Metadata | None = None
    if frames:
        metadata = make_metadata(frames[0], _FPS, width, height)
        metadata["frames_indices"] = list(range(frames[0]))
    for device in ("meta", "cpu"):
        if device == "cpu" and math.prod(shape) > _MAX_BLANK_PIXELS:
            return None
        media = torch.zeros((*frames, 3, height, width), dtype=torch.uint8, device=device)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the same warnings come with the item itself
                num_embeds, num_values = processor.count_item(
                    modality, media, metadata, processor_kwargs
                )
        except Exception:  # odd options make processors raise anything; they are refused later
            continue
        return ItemCost(num_embeds=num_embeds, num_values=num_values)
    return None


def _iter_image_shapes(limits: MediaLimits) -> Iterator[Shape]:
    """Yield image shapes to measure: usual ones, and the largest allowed ones of several ratios.

    The most costly image that the server accepts is assumed to be as costly as one of them.
    """
    for edge in _USUAL_EDGES:
        if edge**2 <= limits.max_pixels:
            yield edge, edge
    yield from (_fit(ratio, limits.max_pixels) for ratio in _RATIOS)


def _iter_video_shapes(num_frames: int, limits: MediaLimits) -> Iterator[Shape]:
    """Yield shapes of videos to measure, with small frames and with the largest allowed ones."""
    most = max(1, min(limits.max_pixels, limits.max_video_pixels // num_frames))
    edge = min(336, math.isqrt(most))
    yield num_frames, edge, edge
    yield from ((num_frames, *_fit(ratio, most)) for ratio in (1.0, 9 / 16, 16 / 9))


def _fit(ratio: float, max_pixels: int) -> tuple[int, int]:
    height = max(1, math.isqrt(int(max_pixels * ratio)))
    return height, max(1, max_pixels // height)


_CLIP_FPS = 30.0
_CLIP_SECONDS = (1.0, 20.0, 600.0)  # and the longest that is allowed
# Processes the item of a `CostCheck` with the options that it gets.
ProcessOwn = Callable[[Mapping[str, Any]], ProcessedItem]


class OwnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's options for the processor and the decoders; a request may override them."""

    processor_kwargs: dict[str, Any] = {}
    media_io_kwargs: dict[str, dict[str, Any]] = {}

    def resolve(
        self, modality: str, *, is_encoded: bool
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the options for the processor, and for the decoder (`None` for decoded items)."""
        if not is_encoded:
            return dict(self.processor_kwargs), None
        return resolve_options(modality, self.processor_kwargs, self.media_io_kwargs)


class CostGuard:
    """A guard against requests with options that make media items too large.

    It is not thread-safe, because it calls the model's processor.
    """

    def __init__(
        self, processor: MultiModalProcessor, limits: MediaLimits, own: OwnOptions
    ) -> None:
        self.processor = processor
        self.own = own
        self._limits = limits
        self._ceilings: dict[str, ItemCost] = {}  # by modality, measured when first needed

    def make_check(
        self,
        modality: str,
        processor_kwargs: Mapping[str, Any],
        decode_options: Mapping[str, Any] | None,
    ) -> CostCheck | None:
        """Return a check for an item with these options, or `None` for the server's own options.

        `decode_options` is `None` for an item that is decoded already.
        """
        is_encoded = decode_options is not None
        own_kwargs, own_decode = self.own.resolve(modality, is_encoded=is_encoded)
        names = _list_changes(processor_kwargs, own_kwargs)
        names += [n for n in _list_changes(decode_options, own_decode) if n not in names]
        if not names:
            return None
        return CostCheck(
            guard=self,
            modality=modality,
            names=names,
            processor_kwargs=processor_kwargs,
            own_kwargs=own_kwargs,
            own_decode=own_decode or {},
        )

    def get_ceiling(self, modality: str) -> ItemCost:
        """Return the largest cost that any item can have with the server's own options.

        It is zero for audio, which can't be measured: audio processors read values, and the longest
        audio lasts hours.
        """
        if modality not in self._ceilings:
            own_kwargs, _ = self.own.resolve(modality, is_encoded=True)
            ceiling = ItemCost()
            for shape in self._iter_shapes(modality):
                cost = measure(self.processor, modality, shape, own_kwargs)
                ceiling = ceiling if cost is None else ceiling.join(cost)
            self._ceilings[modality] = ceiling
        return self._ceilings[modality]

    def _iter_shapes(self, modality: str) -> Iterator[Shape]:
        if modality == "image":
            yield from _iter_image_shapes(self._limits)
        elif modality == "video":
            for num_frames in self._count_frames():
                yield from _iter_video_shapes(num_frames, self._limits)

    def _count_frames(self) -> list[int]:
        """Return how many frames the server's own options keep of clips of different lengths."""
        _, options = self.own.resolve("video", is_encoded=True)
        choose_frames = make_frame_chooser(self.processor.video_processor, options or {})
        counts = set()
        for seconds in (*_CLIP_SECONDS, self._limits.max_duration_s):
            total = max(1, int(min(seconds, self._limits.max_duration_s) * _CLIP_FPS))
            chosen = choose_frames(make_metadata(total, _CLIP_FPS, width=640, height=360))
            counts.add(min(len(chosen), self._limits.max_frames))
        return sorted(counts)


@dataclass(slots=True, kw_only=True)
class CostCheck:
    """The check of one media item with options that differ from the server's own."""

    guard: CostGuard
    modality: str
    names: list[str]  # of options that the server would set otherwise
    processor_kwargs: Mapping[str, Any]
    own_kwargs: Mapping[str, Any]  # the server's own options for the processor
    own_decode: Mapping[str, Any]  # the server's own options for the decoder
    own_cost: ItemCost | None = None  # the cost of this item with the server's own options

    def check_shape(self, shape: Shape, own_shape: Shape | None = None) -> None:
        """Raise `RequestError` before decoding if an item of this shape would become too large.

        `own_shape` is the shape with the server's own options, if these choose another number of
        frames.
        """
        processor = self.guard.processor
        self.own_cost = measure(processor, self.modality, own_shape or shape, self.own_kwargs)
        cost = measure(processor, self.modality, shape, self.processor_kwargs)
        if cost is not None:
            self._refuse_if_beyond(cost, self.own_cost or ItemCost())

    def check_frames(self, choose_frames: ChooseFrames, lock: Lock) -> ChooseFrames:
        """Return `choose_frames` with a check of the chosen frames, before any is decoded.

        The returned function calls the model's processor while it holds `lock`.
        """
        own_choice = make_frame_chooser(self.guard.processor.video_processor, self.own_decode)

        def choose(metadata: Mapping[str, Any]) -> Any:
            indices = choose_frames(metadata)
            size = metadata["height"], metadata["width"]
            own_count = len(own_choice(metadata))
            with lock:
                self.check_shape((len(indices), *size), (own_count, *size))
            return indices

        return choose

    def check_result(self, item: ProcessedItem, process_own: ProcessOwn) -> None:
        """Raise `RequestError` if a processed item is too large.

        `process_own` processes the item with other options. It is called with the server's own
        options if their cost could not be estimated before decoding.
        """
        if self.own_cost is None:
            try:
                self.own_cost = get_cost(process_own(self.own_kwargs))
            except RequestError:  # it can't be processed with the server's own options
                self.own_cost = ItemCost()
        self._refuse_if_beyond(get_cost(item), self.own_cost)

    def _refuse_if_beyond(self, cost: ItemCost, own: ItemCost) -> None:
        if cost.is_within(own):
            return
        limit = own.join(self.guard.get_ceiling(self.modality))
        if cost.is_within(limit):
            return
        raise RequestError(
            f"with the option(s) {', '.join(self.names)} this {self.modality} would become "
            f"{_describe(cost)}; without them this server makes at most {_describe(limit)}: ask "
            "for less, or start the server with --allow-larger-media"
        )


def _describe(cost: ItemCost) -> str:
    return f"{cost.num_embeds} embeddings from {cost.num_values} values"


def _list_changes(given: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> list[str]:
    """Return the sorted names of options that differ between a request and the server."""
    given, own = given or {}, own or {}
    # They are compared as text, because comparing arrays gives an array.
    changed = [name for name, value in given.items() if repr(value) != repr(own.get(name))]
    return sorted(changed + [name for name in own if name not in given])
