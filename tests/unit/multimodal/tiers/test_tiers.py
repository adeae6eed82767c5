"""Media items in tiers: their parts, what is enough for a request, and what is never kept."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sensorium.multimodal.cache.interface import ItemHandle
from sensorium.multimodal.tiers.disk import DiskStore
from sensorium.multimodal.tiers.tiers import MediaTiers, _encode, _name
from sensorium.multimodal.tiers.writer import BackgroundWriter
from sensorium.types.multimodal import ENCODED, PRECOMPUTED, ItemLayout, MultiModalKwargsItem

HASH = "ab" * 32
LAYOUT = ItemLayout(text="<image><image>", token_id=7, num_embeds=2)
PIXELS = torch.arange(60_000, dtype=torch.float32).reshape(100, 600)
GRID = torch.tensor([[1, 10, 10]])
TENSORS = {"pixel_values": PIXELS, "image_grid_thw": GRID}
EMBEDS = torch.randn(2, 8).to(torch.bfloat16)


def make_tiers(folder: Path, model: str = "model") -> MediaTiers:
    return MediaTiers([DiskStore(folder, 2**24)], model=model, processing="limits")


def save(
    tiers: MediaTiers,
    tensors: MultiModalKwargsItem | None = TENSORS,
    *,
    mm_hash: str = HASH,
    layout: ItemLayout | None = LAYOUT,
) -> None:
    handle = ItemHandle(modality="image", mm_hash=mm_hash, layout=layout, num_bytes=1000)
    tiers.save_item(handle, lambda: nullcontext(tensors), 1000)


def test_an_item_comes_back_as_it_was(tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path)
    save(tiers)
    tiers.close()
    item = make_tiers(tmp_path).load_item(HASH, takes_encoded=True)
    assert item is not None
    assert (item.mm_hash, item.modality, item.layout) == (HASH, "image", LAYOUT)
    assert list(item.kwargs) == list(TENSORS)
    assert all(torch.equal(item.kwargs[name], TENSORS[name]) for name in TENSORS)


def test_a_slow_store_keeps_few_threads_and_others_count_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = make_tiers(tmp_path)
    save(tiers)
    tiers.close()
    later = make_tiers(tmp_path)
    (store,) = later._stores
    answers, num_asked, get = threading.Event(), threading.Semaphore(0), store.get

    def get_slowly(*arguments: Any) -> bytearray | None:
        num_asked.release()
        assert answers.wait(120)
        return get(*arguments)

    monkeypatch.setattr(store, "get", get_slowly)
    found: list[object] = []

    def look() -> None:
        found.append(later.load_item(HASH, takes_encoded=True))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert num_asked.acquire(timeout=120)
    assert later.load_item(HASH, takes_encoded=True) is None
    assert later.num_skipped == 1
    answers.set()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert None not in found
    assert later.load_item(HASH, takes_encoded=True) is not None


def test_an_encoder_output_replaces_the_large_tensors(tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path)
    save(tiers)
    tiers.save_encoded(HASH, EMBEDS)
    tiers.close()
    later = make_tiers(tmp_path)
    item = later.load_item(HASH, takes_encoded=True)
    assert item is not None
    assert item.kwargs.keys() == {"image_grid_thw", ENCODED}
    assert torch.equal(item.kwargs[ENCODED], EMBEDS)
    assert item.kwargs[ENCODED].dtype == EMBEDS.dtype
    whole = later.load_item(HASH, takes_encoded=False)
    assert whole is not None
    assert whole.kwargs.keys() == TENSORS.keys()


def test_other_weights_have_other_encoder_outputs_and_the_same_items(tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path, "first")
    save(tiers)
    tiers.save_encoded(HASH, EMBEDS)
    tiers.close()
    other = make_tiers(tmp_path, "second")
    assert other.load_encoded(HASH, 2) is None
    item = other.load_item(HASH, takes_encoded=True)
    assert item is not None
    assert item.kwargs.keys() == TENSORS.keys()


def test_other_limits_find_no_item(tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path)
    save(tiers)
    tiers.save_encoded(HASH, EMBEDS)
    tiers.close()
    stricter = MediaTiers([DiskStore(tmp_path, 2**24)], model="model", processing="stricter limits")
    assert stricter.load_item(HASH, takes_encoded=True) is None
    assert stricter.load_encoded(HASH, 2) is not None, "for an item that was processed and checked"


@pytest.mark.parametrize("lost", ["layout", "tensors", "encoded"])
def test_an_item_with_a_lost_part_is_absent_or_loaded_from_the_others(
    lost: str, tmp_path: Path
) -> None:
    tiers = make_tiers(tmp_path)
    save(tiers)
    tiers.save_encoded(HASH, EMBEDS)
    tiers.close()
    (path,) = tmp_path.glob(f"*/{HASH}.{lost}*")
    path.write_bytes(b"damaged")
    later = make_tiers(tmp_path)
    item = later.load_item(HASH, takes_encoded=True)
    whole = later.load_item(HASH, takes_encoded=False)
    if lost == "layout":
        assert item is None
        assert whole is None
    elif lost == "tensors":
        assert item is not None
        assert ENCODED in item.kwargs
        assert whole is None
    else:
        assert item is not None
        assert item.kwargs.keys() == TENSORS.keys()
        assert whole is not None


@pytest.mark.parametrize(
    "mm_hash", ["../../etc/passwd", "cat.png", HASH.upper(), HASH + "/x", f"{HASH}@x", ""]
)
def test_names_that_are_no_hashes_are_not_kept(mm_hash: str, tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path)
    save(tiers, mm_hash=mm_hash)
    tiers.save_encoded(mm_hash, EMBEDS)
    tiers.close()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["taken"]
    assert tiers.load_item(mm_hash, takes_encoded=True) is None
    assert tiers.load_encoded(mm_hash, 2) is None


def test_an_audio_window_has_its_own_encoder_output(tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path)
    tiers.save_encoded(f"{HASH}@3000", EMBEDS)
    tiers.close()
    later = make_tiers(tmp_path)
    assert later.load_encoded(HASH, 2) is None
    assert later.load_encoded(f"{HASH}@300", 2) is None
    found = later.load_encoded(f"{HASH}@3000", 2)
    assert found is not None
    assert torch.equal(found, EMBEDS)


@pytest.mark.parametrize(
    ("tensors", "layout"),
    [
        (None, LAYOUT),
        (TENSORS, None),
        ({PRECOMPUTED: EMBEDS}, LAYOUT),
        ({"image_grid_thw": GRID, ENCODED: EMBEDS}, LAYOUT),
    ],
)
def test_incomplete_or_encoded_items_are_not_kept(
    tensors: MultiModalKwargsItem | None, layout: ItemLayout | None, tmp_path: Path
) -> None:
    tiers = make_tiers(tmp_path)
    save(tiers, tensors, layout=layout)
    tiers.close()
    assert make_tiers(tmp_path).load_item(HASH, takes_encoded=True) is None


def test_an_encoder_output_of_another_length_is_removed(tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path)
    save(tiers)
    tiers.save_encoded(HASH, EMBEDS[:1])
    tiers.close()
    later = make_tiers(tmp_path)
    item = later.load_item(HASH, takes_encoded=True)
    assert item is not None
    assert item.kwargs.keys() == TENSORS.keys()
    later.save_encoded(HASH, EMBEDS)
    later.close()
    again = make_tiers(tmp_path).load_item(HASH, takes_encoded=True)
    assert again is not None
    assert ENCODED in again.kwargs


ODD_HEADS = (
    b"no message",
    msgspec.msgpack.encode({"tensors": b"", "modality": "text"}).replace(b"text", bytes([255] * 4)),
    msgspec.msgpack.encode({"tensors": b"no list of tensors"}),
)


@pytest.mark.parametrize("head", ODD_HEADS)
def test_an_entry_that_cannot_be_decoded_is_removed(head: bytes, tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path)
    store, name = tiers._stores[0], f"{HASH}.{tiers._encoded}-v2"
    store.put(name, [len(head).to_bytes(8, "little"), head, bytes(64)])
    assert tiers.load_encoded(HASH, 2) is None
    tiers.save_encoded(HASH, EMBEDS)
    tiers.close()
    again = make_tiers(tmp_path).load_encoded(HASH, 2)
    assert again is not None
    assert torch.equal(again, EMBEDS)


ODD_OUTPUTS = (
    torch.randn(2, 9),  # another width
    torch.randn(2),
    torch.tensor(1.0),
    torch.randn(2, 8, 1),
    torch.ones(2, 8, dtype=torch.int64),
    torch.full((2, 8), torch.nan),
    torch.full((2, 8), torch.inf),
    torch.randn(3, 8),
)


@pytest.mark.parametrize("encoded", ODD_OUTPUTS)
def test_a_whole_entry_that_no_encoder_has_made_is_removed(
    encoded: torch.Tensor, tmp_path: Path
) -> None:
    def make() -> MediaTiers:
        store = DiskStore(tmp_path, 2**24)
        return MediaTiers([store], model="model", processing="limits", width=8)

    tiers = make()
    tiers._put(_name(HASH, tiers._encoded), _encode({ENCODED: encoded}))
    assert tiers.load_encoded(HASH, 2) is None
    assert tiers.statistics()["disk"].num_damaged == 1
    tiers.save_encoded(HASH, EMBEDS)
    tiers.close()
    again = make().load_encoded(HASH, 2)
    assert again is not None
    assert torch.equal(again, EMBEDS)


@pytest.mark.parametrize("sizes", [(0, 2**62, 2**62), (0, 2**64 - 1), (2**62, 2**62), (-1, -1)])
def test_tensors_of_impossible_sizes_are_no_entry(sizes: tuple[int, ...], tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path)
    specs = msgspec.msgpack.encode([(ENCODED, "float32", sizes, 0)])
    head = msgspec.msgpack.encode({"tensors": specs})
    store, name = tiers._stores[0], f"{HASH}.{tiers._encoded}-v2"
    store.put(name, [len(head).to_bytes(8, "little"), head, bytes(64)])
    assert tiers.load_encoded(HASH, 2) is None
    assert not store.has(name)


def test_whole_numbers_stay_with_the_encoder_output_however_many(tmp_path: Path) -> None:
    """Positions are computed from masks and grids."""
    mask = torch.ones(1, 30_000, dtype=torch.int32)
    tiers = make_tiers(tmp_path)
    save(tiers, {"input_features": torch.randn(1, 128, 300), "feature_attention_mask": mask})
    tiers.save_encoded(HASH, EMBEDS)
    tiers.close()
    item = make_tiers(tmp_path).load_item(HASH, takes_encoded=True)
    assert item is not None
    assert item.kwargs.keys() == {"feature_attention_mask", ENCODED}


def test_items_used_from_memory_are_rarely_marked_as_used(tmp_path: Path) -> None:
    tiers = make_tiers(tmp_path)
    save(tiers)
    tiers.save_encoded(HASH, EMBEDS)
    assert tiers.writer.wait(10)
    paths = list(tmp_path.glob("*/*"))
    for path in paths:
        os.utime(path, (1, 1))
    tiers.note_use(HASH)
    assert tiers.writer.wait(10)
    assert len(paths) == 3
    assert all(path.stat().st_mtime > 1 for path in paths)
    os.utime(paths[0], (1, 1))
    tiers.note_use(HASH)
    tiers.note_use("no hash")
    assert tiers.writer.wait(10)
    assert paths[0].stat().st_mtime == 1


def test_a_later_store_fills_the_earlier_one(tmp_path: Path) -> None:
    far = DiskStore(tmp_path / "far", 2**24)
    first = MediaTiers([far], model="model", processing="limits")
    save(first)
    first.close()
    near = DiskStore(tmp_path / "near", 2**24)
    both = MediaTiers([near, far], model="model", processing="limits")
    assert both.load_item(HASH, takes_encoded=True) is not None
    both.close()
    assert (
        MediaTiers([near], model="model", processing="limits").load_item(HASH, takes_encoded=True)
        is not None
    )


def test_the_writer_drops_what_it_has_no_memory_for_and_outlives_errors() -> None:
    writer = BackgroundWriter(max_waiting_bytes=100)
    go, done = threading.Event(), []
    writer.submit(go.wait, 60)
    writer.submit(lambda: done.append("fits"), 40)
    writer.submit(lambda: done.append("too much"), 1)
    assert writer.num_dropped == 1
    go.set()
    assert writer.wait(10)
    writer.submit(lambda: 1 / 0, 100)
    writer.submit(lambda: done.append("after an error"), 0)
    writer.submit(lambda: done.append("alone"), 1000)  # larger than all room, but nothing waits
    writer.close()
    assert done[:2] == ["fits", "after an error"]
    writer.submit(lambda: done.append("closed"), 1)
    assert "closed" not in done
