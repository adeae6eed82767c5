"""Brings requests to the core, and sends again what the core has lost.

The core may lack an item that the frontend believes it to have: it was restarted, or a message was
lost. It says so, and the item is sent within the same request: from tensors that are still here,
or processed again from its source. A caller notices a slower answer, never an error; the one
exception is media that the caller itself left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from sensorium.engine.core_process.engine_core import EngineCore
from sensorium.multimodal.cache.interface import SenderCache
from sensorium.multimodal.pipeline import MediaPipeline, PerceivedItem
from sensorium.types.errors import CapacityError
from sensorium.types.outputs import MediaItemReport
from sensorium.types.request import EngineCoreRequest
from sensorium.types.transfer import MissingItems, ShmReference, Transfer

MAX_ATTEMPTS = 4


class Delivery:
    """Not thread-safe: the order of calls is the order of sending."""

    def __init__(self, core: EngineCore, sender: SenderCache, pipeline: MediaPipeline) -> None:
        self._core = core
        self._sender = sender
        self._pipeline = pipeline

    def deliver(
        self, request: EngineCoreRequest, items: Sequence[PerceivedItem]
    ) -> tuple[MediaItemReport, ...]:
        """Raises what the core's `add_request` raises. The handles stay the caller's."""
        own = list(items)
        try:
            for _ in range(MAX_ATTEMPTS):
                transfer = self._sender.make_transfer([item.handle for item in own])
                missing = self._core.add_request(request, transfer)
                if missing is None:
                    return make_reports(items, own, transfer)
                self._recover(own, items, missing)
            raise CapacityError("the core loses media faster than it can be sent")
        finally:
            self._sender.release(
                [new.handle for new, old in zip(own, items, strict=True) if new is not old]
            )

    def _recover(
        self, own: list[PerceivedItem], items: Sequence[PerceivedItem], missing: MissingItems
    ) -> None:
        """Exchange the handles that lead nowhere."""
        self._sender.handle_missing(missing)
        lost = frozenset(missing.mm_hashes)
        for index, item in enumerate(own):
            if item.handle.mm_hash in lost and item.handle.kwargs is None:
                own[index] = self._pipeline.perceive_again(item)
                if item is not items[index]:
                    self._sender.release([item.handle])


def make_reports(
    items: Sequence[PerceivedItem], own: Sequence[PerceivedItem], transfer: Transfer
) -> tuple[MediaItemReport, ...]:
    """`own`: the items as they were sent, some of them perceived again."""
    return tuple(
        MediaItemReport(
            modality=item.handle.modality,
            mm_hash=item.handle.mm_hash,
            is_processor_hit=item.handle.is_hit,
            transfer=_describe(transfer, item.handle.mm_hash),
            times=sent.times,
        )
        for item, sent in zip(items, own, strict=True)
    )


def _describe(transfer: Transfer, mm_hash: str) -> str:
    payload = transfer.payloads.get(mm_hash)
    if payload is None:
        return "none"
    return "shared" if isinstance(payload, ShmReference) else "tensors"
