"""Takes items that come as embeddings, and leaves the others to the backend that processes them.

Embeddings are taken only where an operator said so: whoever sends them decides what the decoder
sees. They need a family in which the number of an item's embeddings says all of its place in a
prompt; where positions follow from a grid, or text stands among the placeholders, they are refused.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from sensorium.multimodal.processing.item_backend import FinishedItem, ItemBackend
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.processing.precomputed_embeds import PrecomputedEmbeds
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.multimodal.single_flight import FinishedFlight, Flight
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import PRECOMPUTED, ProcessedItem


class EmbedsBackend:
    """`modalities`: of which this model takes embeddings; `width`: of its decoder."""

    def __init__(
        self,
        backend: ItemBackend,
        processor: MultiModalProcessor,
        *,
        is_enabled: bool,
        modalities: Collection[str],
        width: int,
    ) -> None:
        self._backend = backend
        self._processor = processor
        self._is_enabled = is_enabled
        self._modalities = frozenset(modalities)
        self._width = width

    def start(self, job: ItemJob, media: object) -> Flight:
        if not isinstance(media, PrecomputedEmbeds):
            return self._backend.start(job, media)
        self._check(job.modality, media.tensor)
        # A copy: the caller may go on with its own.
        embeds = media.tensor.detach().to("cpu", copy=True).contiguous()
        item = ProcessedItem(
            modality=job.modality,
            mm_hash=job.mm_hash,
            kwargs={PRECOMPUTED: embeds},
            layout=self._processor.make_plain_layout(job.modality, len(embeds)),
        )
        return FinishedFlight(FinishedItem(result=item, times={}))

    def _check(self, modality: str, tensor: torch.Tensor) -> None:
        if not self._is_enabled:
            raise RequestError("embeddings are not taken here: start with enable_mm_embeds")
        if modality not in self._modalities:
            raise RequestError(
                f"this model takes no embeddings of {modality}: it needs more than their number"
            )
        if tensor.shape[1] != self._width:
            raise RequestError(f"embeddings have the width {self._width}, not {tensor.shape[1]}")
        if not bool(torch.isfinite(tensor).all()):
            raise RequestError("some of the embeddings are not finite numbers")
