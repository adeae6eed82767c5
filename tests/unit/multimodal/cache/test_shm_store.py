"""The shared-memory store, with several instances in one process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from sensorium.multimodal.cache import shm_memory
from sensorium.multimodal.cache.shm_memory import MAX_MEMBERS, ShmSegment, SlotState
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.types.errors import CapacityError, InvariantError, ModelError, RequestError
from sensorium.types.multimodal import ItemLayout, ProcessedItem, ShmReference

CAPACITY = 16 * 1024
SIZE = 4096 - 128  # with its metadata a quarter of the capacity
LAYOUT = ItemLayout(text="<image>" * 3, token_id=7, num_embeds=3)


def make_hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def make_item(
    name: str, size: int = SIZE, *, layout: ItemLayout | None = None, fill: int = 1
) -> ProcessedItem:
    return ProcessedItem(
        modality="image",
        mm_hash=make_hash(name),
        kwargs={"pixel_values": torch.full((size,), fill, dtype=torch.uint8)},
        layout=layout,
    )


def put(store: ShmStore, item: ProcessedItem) -> ShmReference:
    reference = store.put(item)
    assert reference is not None
    return reference


def keep(store: ShmStore, *names: str) -> None:
    """Put items and don't lease them."""
    for name in names:
        store.release(put(store, make_item(name)))


def use(store: ShmStore, name: str, *, is_use: bool = True) -> None:
    entry = store.acquire(make_hash(name), is_use=is_use)
    assert entry is not None
    store.release(entry.reference)


def get_cached(store: ShmStore) -> str:
    return "".join(name for name in "abcdefgh" if store.is_cached(make_hash(name)))


@pytest.fixture
def store() -> Iterator[ShmStore]:
    with closing(ShmStore.create(capacity_bytes=CAPACITY, max_object_bytes=CAPACITY)) as store:
        yield store


@pytest.fixture
def other(store: ShmStore) -> Iterator[ShmStore]:
    with closing(ShmStore.attach(store.fd)) as other:
        yield other


def test_another_instance_reads_what_was_put_without_a_copy(
    store: ShmStore, other: ShmStore
) -> None:
    kwargs = {
        "pixel_values": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "grid": torch.tensor([[1, 2, 3]]),
        "empty": torch.empty(0, 4),
    }
    item = ProcessedItem(modality="image", mm_hash="any string", kwargs=kwargs, layout=LAYOUT)
    reference = put(store, item)
    entry = other.lease(reference)
    assert entry is not None
    assert (entry.reference, entry.modality, entry.mm_hash) == (reference, "image", "any string")
    assert (entry.layout, entry.num_bytes) == (LAYOUT, 128)
    opened = other.open(reference)
    assert opened.keys() == kwargs.keys()
    assert all(torch.equal(opened[name], kwargs[name]) for name in kwargs)
    assert opened["grid"].data_ptr() == other.open(reference)["grid"].data_ptr()


def test_a_stored_item_is_leased_and_not_stored_again(store: ShmStore, other: ShmStore) -> None:
    reference = put(store, make_item("a", fill=1))
    assert put(other, make_item("a", fill=2)) == reference
    assert other.open(reference)["pixel_values"][0] == 1
    assert store.statistics().num_items == 1


def test_least_recently_used_item_is_evicted(store: ShmStore) -> None:
    keep(store, *"abcd")
    assert get_cached(store) == "abcd"
    use(store, "a")
    keep(store, "b")
    keep(store, "e", "f")
    assert get_cached(store) == "abef"
    assert store.statistics().num_evictions == 2


def test_an_item_that_is_touched_is_evicted_later(store: ShmStore) -> None:
    keep(store, *"abcd")
    store.touch(make_hash("a"))
    keep(store, "e")
    assert get_cached(store) == "acde"


def test_a_lease_counts_as_a_use_unless_it_is_said_not_to(store: ShmStore) -> None:
    keep(store, *"abcd")
    use(store, "a")
    use(store, "b", is_use=False)
    keep(store, "e")
    assert get_cached(store) == "acde"


def test_leased_items_are_never_evicted(store: ShmStore, other: ShmStore) -> None:
    reference = put(other, make_item("a", fill=9))
    keep(store, *"bcdefgh")
    assert get_cached(store) == "afgh"
    assert (other.open(reference)["pixel_values"] == 9).all()
    other.release(reference)
    keep(store, "b")
    assert get_cached(store) == "bfgh"


def test_item_without_room_is_not_stored(store: ShmStore) -> None:
    assert store.put(make_item("a", CAPACITY + 1)) is None
    references = [put(store, make_item(name)) for name in "bcde"]
    assert store.put(make_item("a")) is None
    assert store.statistics().num_oversize == 2
    store.release(references[0])
    assert store.put(make_item("a")) is not None


def test_object_above_the_limit_is_not_stored() -> None:
    with closing(ShmStore.create(capacity_bytes=CAPACITY, max_object_bytes=1024)) as store:
        assert store.put(make_item("a", 1025)) is None
        assert store.put(make_item("a", 1024)) is not None


def test_large_item_takes_the_place_of_neighbours_only(store: ShmStore) -> None:
    """Of the old ones, those that don't lie in the way stay."""
    keep(store, *"abcd")
    for name in "cabd":
        use(store, name)
    # The two oldest, c and a, are no neighbours. With b there is room: that of a and b.
    store.release(put(store, make_item("e", 2 * SIZE)))
    assert get_cached(store) == "cde"


def test_slots_run_out_before_memory() -> None:
    with closing(ShmStore.create(capacity_bytes=64 * 1024, max_object_bytes=1024)) as store:
        for number in range(65):
            store.release(put(store, make_item(str(number), 1)))
        assert store.statistics().num_items == 64
        assert not store.is_cached(make_hash("0"))
        assert store.is_cached(make_hash("1"))


def test_stale_references_are_not_leased(store: ShmStore, other: ShmStore) -> None:
    reference = put(store, make_item("a"))
    store.release(reference)
    store.clear_cache()
    again = put(store, make_item("b"))
    assert again.slot == reference.slot
    assert other.lease(reference) is None
    assert other.lease(ShmReference(slot=10_000, generation=1)) is None


def test_cleared_items_stay_good_for_their_leaseholders(store: ShmStore, other: ShmStore) -> None:
    reference = put(store, make_item("a", fill=3))
    keep(store, "b")
    other.clear_cache()
    assert get_cached(store) == ""
    assert other.lease(reference) is not None
    keep(store, *"cdefgh")
    assert (other.open(reference)["pixel_values"] == 3).all()
    store.release(reference)
    other.release(reference)
    assert other.lease(reference) is None
    keep(store, *"abcd")
    assert get_cached(store) == "abcd"


def test_item_put_while_the_cache_is_cleared_is_not_found_afterwards(
    store: ShmStore, other: ShmStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store._write

    def clear_and_write(*arguments: object) -> None:
        other.clear_cache()
        write(*arguments)

    monkeypatch.setattr(store, "_write", clear_and_write)
    reference = put(store, make_item("a", fill=5))
    assert not other.is_cached(make_hash("a"))
    assert other.lease(reference) is not None
    assert (other.open(reference)["pixel_values"] == 5).all()


def test_of_two_writers_the_faster_one_wins(
    store: ShmStore, other: ShmStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = []
    write = store._write

    def write_second(*arguments: object) -> None:
        references.append(put(other, make_item("a")))
        write(*arguments)

    monkeypatch.setattr(store, "_write", write_second)
    assert put(store, make_item("a")) == references[0]
    monkeypatch.undo()
    # The loser's room is free, and its lease on it forgotten.
    store.release(references[0])
    other.release(references[0])
    store.clear_cache()
    for name in "bcd":
        put(other, make_item(name))
    assert list(store._index.get_members()) == [other._member]


def test_an_item_that_fails_to_copy_leaves_nothing(
    store: ShmStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write", fail)
        with pytest.raises(KeyboardInterrupt):
            store.put(make_item("a"))
    assert (store._index._states == SlotState.FREE).all()
    put(store, make_item("a"))


def test_tensors_of_an_unknown_kind_are_refused(store: ShmStore) -> None:
    item = ProcessedItem(
        modality="image", mm_hash="a", kwargs={"x": torch.zeros(1, dtype=torch.cfloat)}, layout=None
    )
    with pytest.raises(RequestError, match="complex64"):
        store.put(item)


def test_item_with_a_layout_replaces_one_without(store: ShmStore, other: ShmStore) -> None:
    bare = put(store, make_item("a"))
    whole = put(store, make_item("a", layout=LAYOUT))
    assert whole != bare
    entry = other.acquire(make_hash("a"))
    assert entry is not None
    assert (entry.reference, entry.layout) == (whole, LAYOUT)
    assert other.lease(bare) is not None
    assert put(store, make_item("a")) == whole
    assert store.statistics().num_items == 1


def test_strings_that_look_alike_have_distinct_keys(store: ShmStore) -> None:
    digest = make_hash("a")
    put(store, make_item("a"))
    for mm_hash in (digest.upper(), digest + "\n", digest[:-1], ""):
        assert not store.is_cached(mm_hash)


def test_a_lease_lasts_until_it_is_released_as_often_as_taken(
    store: ShmStore, other: ShmStore
) -> None:
    reference = put(store, make_item("a"))
    store.lease(reference)
    store.release(reference)
    other.clear_cache()
    assert other.lease(reference) is not None
    other.release(reference)
    store.release(reference)
    assert other.lease(reference) is None
    with pytest.raises(InvariantError, match="more often"):
        store.release(reference)
    with pytest.raises(InvariantError, match="read without a lease"):
        store.open(reference)


def test_close_gives_leases_back(store: ShmStore) -> None:
    other = ShmStore.attach(store.fd)
    put(other, make_item("a"))
    other.close()
    other.close()
    assert list(store._index.get_members()) == []
    with pytest.raises(InvariantError, match="closed"):
        other.put(make_item("b"))


def test_close_waits_for_a_thread_that_is_writing(
    store: ShmStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ShmStore.attach(store.fd)
    writing, go_on = threading.Event(), threading.Event()
    write = other._write

    def write_slowly(*arguments: object) -> None:
        writing.set()
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(other, "_write", write_slowly)
    threads = [
        threading.Thread(target=other.put, args=(make_item("a"),)),
        threading.Thread(target=other.close),
    ]
    threads[0].start()
    assert writing.wait(60)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert get_cached(store) == "a"


def test_members_are_limited(store: ShmStore) -> None:
    others = [ShmStore.attach(store.fd) for _ in range(MAX_MEMBERS - 1)]
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError):
        ShmStore.attach(store.fd)
    assert len(os.listdir("/proc/self/fd")) <= num_open
    reference = put(others[-1], make_item("a"))
    store.clear_cache()
    assert store.lease(reference) is not None
    for other in others:
        other.close()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ModelError, match=">= 1 byte"):
        ShmStore.create(capacity_bytes=0, max_object_bytes=1)
    fd = os.memfd_create("other")
    os.ftruncate(fd, 8192)
    with pytest.raises(InvariantError, match="not a shared-memory media cache"):
        ShmStore.attach(fd)
    os.close(fd)


def test_threads_share_an_instance(store: ShmStore) -> None:
    errors = []

    def work(seed: int) -> None:
        for number in range(100):
            name = "abcdef"[(seed * number) % 6]
            reference = store.put(make_item(name, fill=ord(name)))
            if reference is None:
                continue
            if not (store.open(reference)["pixel_values"] == ord(name)).all():
                errors.append(name)
            store.release(reference)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    # Not the leases in the table: a slot that lost a race was freed with its lease in it.
    assert store._num_leases.total() == 0


EXTENT = 64 * 1024  # for the tests of a cache that is reserved as it fills
LARGE = 30_000  # bytes of an item: two in an extent


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShmStore]:
    """A store of four small extents."""
    monkeypatch.setattr(shm_memory, "EXTENT_BYTES", EXTENT)
    with closing(ShmStore.create(capacity_bytes=4 * EXTENT, max_object_bytes=2 * EXTENT)) as store:
        yield store


def get_num_extents(store: ShmStore) -> float:
    """Return how many extents of memory the kernel has given to a store."""
    table_bytes = shm_memory.get_table_bytes(store._index.num_slots)
    return (os.fstat(store.fd).st_blocks * 512 - table_bytes) / EXTENT


def put_large(store: ShmStore, names: str) -> None:
    for index, name in enumerate(names):
        store.release(put(store, make_item(name, LARGE, fill=index + 1)))


def check_large(store: ShmStore, name: str, fill: int) -> None:
    entry = store.acquire(make_hash(name))
    assert entry is not None
    pixels = store.open(entry.reference)["pixel_values"]
    assert isinstance(pixels, torch.Tensor)
    assert (pixels == fill).all()
    store.release(entry.reference)


def test_a_default_cache_takes_little_memory_before_it_has_items() -> None:
    store = ShmStore.create(capacity_bytes=4 * 2**30, max_object_bytes=128 * 2**20)
    other = ShmStore.attach(store.fd)
    assert os.fstat(store.fd).st_blocks * 512 < 4 * 2**20
    keep(other, "a")
    assert os.fstat(store.fd).st_blocks * 512 < 70 * 2**20
    assert get_cached(store) == "a"
    for each in (store, other):
        each.close()


def test_any_process_reserves_memory_as_the_cache_fills(growing: ShmStore) -> None:
    assert get_num_extents(growing) == 0
    with closing(ShmStore.attach(growing.fd)) as other:
        put_large(growing, "ab")
        assert get_num_extents(growing) == 1
        put_large(other, "cde")
        assert get_num_extents(growing) == 3
        for index, name in enumerate("abcde"):
            check_large(growing, name, (index if index < 2 else index - 2) + 1)
    put_large(growing, "fgh")
    assert get_num_extents(growing) == 4
    assert get_cached(growing) == "abcdefgh"
    assert growing.statistics().num_evictions == 0
    put_large(growing, "i")
    assert get_num_extents(growing) == 4
    assert get_cached(growing) == "bcdefgh"


def test_an_item_larger_than_an_extent_takes_several(growing: ShmStore) -> None:
    growing.release(put(growing, make_item("a", EXTENT + 10_000)))
    assert get_num_extents(growing) == 2


@pytest.mark.parametrize("is_exhausted", [False, True], ids=["fallocate fails", "little is left"])
def test_without_memory_to_reserve_the_cache_is_full_for_as_long_as_that_lasts(
    growing: ShmStore, monkeypatch: pytest.MonkeyPatch, *, is_exhausted: bool
) -> None:
    def fail(*_: int) -> None:
        raise OSError(28, "No space left on device")

    put_large(growing, "abcd")
    with monkeypatch.context() as patch:
        if is_exhausted:
            patch.setattr(shm_memory, "get_free_system_bytes", lambda: EXTENT)
        else:
            patch.setattr(os, "posix_fallocate", fail)
        put_large(growing, "ef")
        assert get_cached(growing) == "cdef"
        assert growing.put(make_item("huge", 2 * EXTENT - 1000)) is not None
        assert growing.put(make_item("another", 2 * EXTENT - 1000)) is None  # all is leased
        assert get_num_extents(growing) == 2
    growing.release(put(growing, make_item("a")))
    assert get_num_extents(growing) == 3


def test_a_process_that_dies_between_reserving_and_noting_it_does_no_harm(
    growing: ShmStore,
) -> None:
    table_bytes = shm_memory.get_table_bytes(growing._index.num_slots)
    assert growing._segment.reserve(table_bytes, table_bytes + EXTENT)
    put_large(growing, "abc")
    assert get_num_extents(growing) == 2
    assert get_cached(growing) == "abc"


def test_a_file_system_that_is_too_small_costs_items_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real tmpfs of 1 MiB, where a page that is not reserved would be a SIGBUS."""
    monkeypatch.setattr(shm_memory, "EXTENT_BYTES", EXTENT)
    with small_tmpfs(tmp_path, num_bytes=2**20) as folder:
        fd = os.open(folder / "memory", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 4 * 2**20)
        os.posix_fallocate(fd, 0, shm_memory.get_table_bytes(64))
        segment = ShmSegment(fd)
        shm_memory.write_header(
            segment, num_slots=64, capacity_bytes=2 * 2**20, max_object_bytes=2 * 2**20
        )
        with closing(ShmStore(segment)) as store:
            names = [f"item {index}" for index in range(60)]
            for index, name in enumerate(names):
                store.release(put(store, make_item(name, LARGE, fill=index)))
            kept = [name for name in names if store.is_cached(make_hash(name))]
            assert 20 < len(kept) < 40
            assert kept == names[-len(kept) :]
            for name in kept:
                check_large(store, name, names.index(name))
        del store, segment


@contextmanager
def small_tmpfs(tmp_path: Path, *, num_bytes: int) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    options = f"size={num_bytes}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        # Lazily: a mapping may be dropped only after the test.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
