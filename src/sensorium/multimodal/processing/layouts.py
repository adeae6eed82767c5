"""Layouts of images from their sizes alone, for requests that need no tensors.

With the processors named here, the text that stands for an image in a prompt depends only on the
size of the image and on the processor's options. So each size is processed once, as a blank image,
and images of that size are neither decoded nor processed.
"""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
from PIL import Image

from sensorium.multimodal.decoding.images import read_image_size
from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.multimodal.names import MediaHasher
from sensorium.multimodal.processing.item_backend import FinishedItem, ItemBackend
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.multimodal.single_flight import Flight, SingleFlight
from sensorium.types.errors import CapacityError, InvariantError
from sensorium.types.multimodal import ItemLayout, ProcessedItem
from sensorium.utils.lru import LruCache

# For these processors tests/integration/test_layouts.py compares layouts over many sizes.
SIZED_PROCESSORS = frozenset(
    {
        "AyaVisionProcessor",
        "Cohere2VisionProcessor",
        "Gemma3Processor",
        "Gemma4Processor",
        "Glm4vProcessor",
        "Idefics3Processor",
        "InternVLProcessor",
        "LlavaNextProcessor",
        "LlavaOnevisionProcessor",
        "LlavaProcessor",
        "Qwen2VLProcessor",
        "Qwen2_5OmniProcessor",
        "Qwen2_5_VLProcessor",
        "Qwen3VLProcessor",
        "SmolVLMProcessor",
    }
)
_OWN_MODULES = "transformers.models."  # a class from a checkpoint may have one of these names
_MAX_CHARACTERS = 2**25  # of all layouts that are kept


def has_sized_images(processor: MultiModalProcessor) -> bool:
    """Return True if the layout of an image is known to depend only on its size and the options."""
    kind = type(processor.hf_processor)
    is_known = kind.__name__ in SIZED_PROCESSORS and kind.__module__.startswith(_OWN_MODULES)
    return is_known and "image" in processor.modalities


class SizeLayouts:
    """A thread-safe cache of image layouts by size, separate from all caches of tensors."""

    def __init__(self, *, hasher: MediaHasher, backend: ItemBackend, limits: MediaLimits) -> None:
        self._hasher = hasher
        self._backend = backend
        self._limits = limits
        self._layouts: LruCache[str, ItemLayout] = LruCache(
            _MAX_CHARACTERS, lambda _, layout: max(1, len(layout.text))
        )
        self._flights: SingleFlight[str, FinishedItem] = SingleFlight()

    def get(
        self, job: ItemJob, source: object, *, cancelled: Future[None] | None = None
    ) -> ItemLayout | None:
        """Return the layout of an image without decoding it, or `None` if that is not possible.

        It is possible for the bytes of an image file with its size in the header. Raise
        `RequestError` if the file is no image, or if the processor refuses images of this size, and
        `CancelledError` if `cancelled` completes before the processor has ended.
        """
        if job.modality != "image" or not isinstance(source, MediaBytes):
            return None
        size = read_image_size(source.data, limits=self._limits)
        if size is None:
            return None
        key = self._name(size, job)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._process(key, size, job, cancelled)
            self._layouts.put(key, layout)
        return layout

    def _name(self, size: tuple[int, int], job: ItemJob) -> str:
        """Return a hash of everything that the layout depends on, as the key in the cache."""
        return self._hasher.name_item(
            self._hasher.digest_source(f"{size[0]} x {size[1]}"),
            modality=job.modality,
            decode_options=None,
            processor_kwargs=job.processor_kwargs,
            cache_salt=None,
        )

    def _process(
        self, key: str, size: tuple[int, int], job: ItemJob, cancelled: Future[None] | None
    ) -> ItemLayout:
        def start() -> Flight:
            blank = msgspec.structs.replace(job, mm_hash=key, decode_options=None)
            return self._backend.start(blank, Image.new("RGB", size))

        try:
            timeout_s = self._limits.flight_timeout_s
            finished = self._flights.get(key, start, timeout_s=timeout_s, cancelled=cancelled)
        except TimeoutError as error:  # it is not known here what took so long
            raise CapacityError(
                "the layout of the image could not be computed in time: retry later"
            ) from error
        result = finished.result
        if not isinstance(result, ProcessedItem) or result.layout is None:
            raise InvariantError("a processed blank image has no layout (its text in prompts)")
        return result.layout
