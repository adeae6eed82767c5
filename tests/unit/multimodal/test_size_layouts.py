"""How many layouts of sizes are kept."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.multimodal.names import MediaHasher
from sensorium.multimodal.processing import layouts
from sensorium.multimodal.processing.item_backend import FinishedItem
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.processing.layouts import SizeLayouts
from sensorium.multimodal.single_flight import FinishedFlight, Flight
from sensorium.types.multimodal import ItemLayout, ProcessedItem


class EmptyBackend:
    """Processes every image to a layout without any text."""

    def start(self, job: ItemJob, media: object) -> Flight:
        layout = ItemLayout(text="", token_id=7, num_embeds=0)
        item = ProcessedItem(
            modality=job.modality, mm_hash=job.mm_hash, kwargs={"size": media}, layout=layout
        )
        return FinishedFlight(FinishedItem(result=item, times={}))


def make_png(width: int) -> MediaBytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, 1)).save(stream, "PNG")
    return MediaBytes(stream.getvalue())


def test_layouts_without_text_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_MAX_CHARACTERS", 2)
    sizes = SizeLayouts(hasher=MediaHasher(), backend=EmptyBackend(), limits=MediaLimits())
    job = ItemJob(mm_hash="", modality="image", decode_options={}, processor_kwargs={})
    for width in range(1, 5):
        assert sizes.get(job, make_png(width)) is not None
    assert len(sizes._layouts) == 2
