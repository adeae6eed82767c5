"""Checks the items that come from a store, as items are checked that a client sends.

A checksum says that an entry is as it was written, and not that it makes sense: another version, or
somebody else with access to the store, may have written it. Sizes that don't fit would fail the
request, or let the model allocate any amount of memory for the item's positions.
"""

from __future__ import annotations

from threading import Lock

import torch

from sensorium.multimodal.processing.item_spec import ItemSpecs
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ENCODED, ProcessedItem
from sensorium.utils.lru import LruCache

_MAX_OPTION_SETS = 16  # of the processor, for which the rules are remembered


class StoredItems:
    """A check of items from a store. Several threads may use it.

    `lock` is held by everything that uses the model's processor.
    """

    def __init__(self, processor: MultiModalProcessor, lock: Lock) -> None:
        self._processor = processor
        self._lock = lock
        self._specs: LruCache[str, ItemSpecs] = LruCache(_MAX_OPTION_SETS)  # by options

    def check(self, job: ItemJob, item: ProcessedItem) -> None:
        """Raise a `RequestError` if processing the job can't have made this item."""
        layout, kwargs = item.layout, item.kwargs
        if layout is None or item.modality != job.modality:
            raise RequestError(f"it is no {job.modality} with a layout")
        self._processor.check_layout(job.modality, layout)
        key = repr(sorted(job.processor_kwargs.items()))
        specs = self._specs.get(key)
        if specs is None:
            specs = ItemSpecs(self._processor, job.processor_kwargs, lock=self._lock)
            self._specs.put(key, specs)
        if ENCODED in kwargs:
            beside = {name: tensor for name, tensor in kwargs.items() if name != ENCODED}
            specs.check_encoded(job.modality, beside, layout.num_embeds)
        else:
            specs.check(job.modality, kwargs, layout.num_embeds)
        for name, tensor in kwargs.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise RequestError(f"{name} holds values that are not finite numbers")
