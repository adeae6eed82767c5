"""The thread that runs encoders: what it keeps while it waits, and how it ends."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from sensorium.engine.encoding.towers import TowerThread
from sensorium.models.hf_model import HfModel
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, ProcessedItem
from tests.support.waiting import wait_until


class FakeModel:
    """A model with encoders that call `before`."""

    device = torch.device("cpu")

    def __init__(self, before: Callable[[], Any] = lambda: None) -> None:
        self._before = before

    def encode(
        self, _modality: str, _items: Sequence[MultiModalKwargsItem], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        self._before()
        return [torch.ones(count, 8) for count in counts]


class Pixels(bytearray):
    """Memory of an item that may be watched."""


def make_item(pixels: Pixels) -> ProcessedItem:
    return ProcessedItem(
        modality="image",
        mm_hash="ab" * 32,
        kwargs={"pixel_values": torch.frombuffer(pixels, dtype=torch.float32)},
        layout=ItemLayout(text="<image>", token_id=7, num_embeds=2),
    )


def make_towers(hf_model: FakeModel) -> TowerThread:
    return TowerThread(cast(HfModel, hf_model), max_embeds=8)


def test_the_pixels_of_the_last_items_are_gone_while_nothing_is_encoded() -> None:
    towers = make_towers(FakeModel())
    pixels = Pixels(4096)
    is_there = weakref.ref(pixels)
    encoded = towers.submit(make_item(pixels))
    assert encoded.result(60).shape == (2, 8)
    del pixels, encoded

    def is_gone() -> bool:
        gc.collect()
        return is_there() is None

    wait_until(is_gone)
    assert towers.close(60)


def test_encoders_that_do_not_end_are_abandoned() -> None:
    may_end, has_begun = threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        may_end.wait(60)

    towers = make_towers(FakeModel(wait))
    encoded = towers.submit(make_item(Pixels(64)))
    assert has_begun.wait(60)
    assert not towers.close(0.05)
    may_end.set()
    assert encoded.result(60).shape == (2, 8)
    assert towers.close(60)
