"""What a remote encoder keeps of the items that it has encoded."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from typing import cast

import torch

from sensorium.engine.encoding.service import EncodingService
from sensorium.engine.encoding.towers import TowerThread
from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.multimodal.processing.item_backend import FinishedItem
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.single_flight import FinishedFlight, Flight
from sensorium.types.multimodal import ENCODED, ItemLayout, ProcessedItem

MIB = 2**20
HASH = "ab" * 32


class Block(bytearray):
    """A block of memory as it comes from a process of the pool, which may be watched."""


class Backend:
    """A backend with items of large pixels and a small grid, which are views of one block."""

    def __init__(self) -> None:
        self.blocks: list[weakref.ref[Block]] = []

    def start(self, job: ItemJob, media: object) -> Flight:  # noqa: ARG002
        block = Block(MIB)
        self.blocks.append(weakref.ref(block))
        kwargs = {
            "pixel_values": torch.frombuffer(block, dtype=torch.float32, offset=64),
            "image_grid_thw": torch.frombuffer(block, dtype=torch.int64, count=3),
        }
        layout = ItemLayout(text="<image>", token_id=7, num_embeds=2)
        item = ProcessedItem(
            modality=job.modality, mm_hash=job.mm_hash, kwargs=kwargs, layout=layout
        )
        return FinishedFlight(FinishedItem(result=item, times={}))


class Towers:
    """A stand-in for the thread that runs encoders."""

    num_encoded = 0

    def submit(self, item: ProcessedItem) -> Future[torch.Tensor]:  # noqa: ARG002
        self.num_encoded += 1
        return FinishedFlight(torch.ones(2, 8))


def test_kept_tensors_of_an_item_do_not_keep_its_pixels_in_memory() -> None:
    backend = Backend()
    service = EncodingService(
        backend,
        cast(TowerThread, Towers()),
        limits=MediaLimits(),
        capacity_bytes=MIB,
        max_items=1,
    )
    job = ItemJob(mm_hash=HASH, modality="image", decode_options=None, processor_kwargs={})
    first = service.encode(job, MediaBytes(b"file"))
    again = service.encode(job, MediaBytes(b"file"))
    assert first.result is again.result
    assert isinstance(again.result, ProcessedItem)
    assert again.result.kwargs.keys() == {"image_grid_thw", ENCODED}
    assert again.result.kwargs["image_grid_thw"].tolist() == [0, 0, 0]
    gc.collect()
    assert [block() for block in backend.blocks] == [None]
