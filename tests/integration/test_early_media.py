"""Until its pool is there, a frontend processes media itself; from then on only the pool does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest

from sensorium.engine.assembly.frontend import (
    MediaParts,
    build_caches,
    build_frontend,
    build_store,
    read_checkpoint,
)
from sensorium.engine.assembly.options import LoadingOptions, MediaOptions
from sensorium.multimodal.media import MediaBytes, MediaItem, ProcessingOptions
from sensorium.multimodal.pipeline import CachedItem, MediaPipeline
from sensorium.multimodal.pool.pool import ProcessPool
from sensorium.types.errors import CapacityError, RequestError
from sensorium.utils.pausing import run_through
from tests.support.media import make_pixels, write_image

pytestmark = pytest.mark.xdist_group("pool_perception")
READY_S = 120.0  # only against hangs
_seeds = count()


@contextmanager
def media_with(model: str, *, cache_type: str) -> Iterator[tuple[MediaParts, ProcessPool]]:
    media = MediaOptions(
        mm_processor_cache_type=cache_type, mm_processor_cache_gb=0.03, mm_processor_pool_size=1
    )
    loading = LoadingOptions(model=model)
    store = build_store(media)
    frontend = build_frontend(
        loading,
        read_checkpoint(loading),
        media,
        build_caches(media, store),
        starts_early=True,
        warm_modalities=("image",),
    )
    media_parts = frontend.media_parts
    assert media_parts.pool is not None
    try:
        yield media_parts, media_parts.pool
    finally:
        media_parts.close()


def make_item() -> MediaItem:
    data = write_image(make_pixels(60, 90, seed=next(_seeds)), "PNG")
    return MediaItem(
        path=("multi_modal_data", "image", 0), modality="image", media=MediaBytes(data)
    )


def process_media(pipeline: MediaPipeline, item: MediaItem) -> CachedItem:
    (processed,) = run_through(pipeline.process_pausing([item], ProcessingOptions()))
    pipeline.cache.release([processed.handle])
    return processed


@pytest.mark.parametrize("cache_type", [pytest.param("lru", marks=pytest.mark.slow), "shm"])
def test_items_go_to_the_pool_once_it_is_ready_and_stay_the_same(
    tiny_model: Callable[[str], str], cache_type: str
) -> None:
    with media_with(tiny_model("llava"), cache_type=cache_type) as (media_parts, pool):
        item, rendered = make_item(), make_item()
        assert not process_media(media_parts.pipeline, item).handle.is_hit
        early = read_tensors(process_media(media_parts.readonly, rendered))
        assert pool.get_process_ids() == []  # it was not started
        assert pool.wait_until_ready(READY_S)
        assert pool.statistics().num_done == 0  # its own dummies are no jobs
        assert process_media(media_parts.pipeline, item).handle.is_hit
        process_media(media_parts.pipeline, make_item())
        assert pool.statistics().num_done == 1
        media_parts.readonly.cache.clear_cache()
        late = read_tensors(process_media(media_parts.readonly, rendered))
        assert pool.statistics().num_done == 2
        assert early.keys() == late.keys()
        assert all(np.array_equal(early[name], late[name]) for name in early)


def read_tensors(processed: CachedItem) -> dict[str, Any]:
    assert processed.handle.kwargs is not None
    return {name: tensor.numpy().copy() for name, tensor in processed.handle.kwargs.items()}


def test_limits_hold_before_the_pool_is_ready(tiny_model: Callable[[str], str]) -> None:
    with media_with(tiny_model("llava"), cache_type="lru") as (media_parts, _):
        damaged = MediaItem(
            path=("multi_modal_data", "image", 0),
            modality="image",
            media=MediaBytes(b"\x89PNG\r\n\x1a\n"),
        )
        with pytest.raises(
            RequestError, match=r"image\[0\]: this file can't be decoded as an image"
        ):
            process_media(media_parts.pipeline, damaged)


def test_a_pool_that_can_not_start_is_reported(
    tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Media is not processed in this process instead."""
    monkeypatch.setattr("sensorium.engine.assembly.frontend._HANDLER", "json:no_such_factory")
    with media_with(tiny_model("llava"), cache_type="lru") as (media_parts, pool):
        with pytest.raises(CapacityError):
            pool.wait_until_ready(READY_S)
        with pytest.raises(CapacityError, match="media can't be processed"):
            process_media(media_parts.pipeline, make_item())
