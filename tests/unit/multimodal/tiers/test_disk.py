"""Entries as files: whole or absent, and within the room, while other processes write or die."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sensorium.multimodal.tiers import disk
from sensorium.multimodal.tiers.disk import DiskStore
from sensorium.types.errors import ModelError

MIB = 2**20


def name(number: int) -> str:
    return f"{number:064x}.layout-v1"


def find_file(directory: Path, entry: str) -> Path:
    (path,) = directory.glob(f"*/{entry}.entry")
    return path


def count_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*/*"))


def test_entries_are_shared_by_every_store_of_the_directory(tmp_path: Path) -> None:
    first, second = DiskStore(tmp_path, MIB), DiskStore(tmp_path, MIB)
    assert first.get(name(1)) is None
    assert not first.has(name(1))
    assert first.put(name(1), [b"ab", memoryview(b"cde"), b""])
    assert second.get(name(1)) == b"abcde"
    assert second.has(name(1))
    assert not second.put(name(1), [b"other"]), "an entry never changes"
    assert second.get(name(1)) == b"abcde"
    found = first.statistics()
    assert (found.num_queries, found.num_hits, found.num_writes) == (1, 0, 1)
    assert found.num_bytes == count_bytes(tmp_path) == second.statistics().num_bytes


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "new" / "place", MIB)
    store.put(name(1), [b"secret"])
    paths = [tmp_path / "new" / "place", *(tmp_path / "new" / "place").rglob("*")]
    assert len(paths) == 4
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)


def flip(place: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)

    return damage


def swap_with_another(path: Path) -> None:
    other = DiskStore(path.parents[1], MIB)
    other.put(name(2), [b"another content"])
    find_file(path.parents[1], name(2)).rename(path)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_huge(path: Path) -> None:
    os.truncate(path, 2**43)


@pytest.mark.parametrize(
    "damage",
    [
        replace_by_pipe,
        make_huge,
        flip(0),
        flip(20),
        flip(63),
        flip(64),
        flip(-1),
        swap_with_another,
        replace_by_link,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:10]),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    ],
)
def test_a_damaged_entry_is_absent_and_removed(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    store = DiskStore(tmp_path, MIB)
    store.put(name(1), [b"some content"])
    path = find_file(tmp_path, name(1))
    damage(path)
    num_files = len(os.listdir("/proc/self/fd"))
    assert store.get(name(1)) is None
    assert not path.exists()
    assert not path.is_symlink()
    assert store.statistics().num_damaged == 1
    assert len(os.listdir("/proc/self/fd")) <= num_files
    assert store.put(name(1), [b"some content"]), "it can be written again"
    assert store.get(name(1)) == b"some content"


def test_the_least_recently_used_entries_make_room(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10_000)
    for number in range(9):
        assert store.put(name(number), [bytes(1000)])
        old = time.time() - 1000 + number
        os.utime(find_file(tmp_path, name(number)), (old, old))
    assert store.get(name(0)) is not None  # used just now
    assert store.put(name(9), [bytes(1000)])
    left = [number for number in range(10) if store.has(name(number))]
    assert 0 in left
    assert 9 in left
    assert 1 not in left
    assert left[1:] == list(range(left[1], 10)), "the oldest went first"
    assert count_bytes(tmp_path) == store.statistics().num_bytes <= 10_000
    assert store.statistics().num_evictions == 10 - len(left)


def test_what_is_larger_than_the_room_is_not_kept_and_costs_nothing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1000)
    store.put(name(1), [bytes(100)])
    assert not store.put(name(2), [bytes(1000)])
    assert store.has(name(1))
    assert store.statistics().num_oversize == 1


def test_an_entry_beyond_the_own_room_is_read_where_another_server_has_more(
    tmp_path: Path,
) -> None:
    content = bytes(5000)
    small = DiskStore(tmp_path, 1000)
    assert DiskStore(tmp_path, 10_000).put(name(1), [content])
    assert small.get(name(1)) == content
    assert small.statistics().num_damaged == 0
    assert small.has(name(1))


def test_a_dead_writer_leaves_nothing_that_counts_for_ever(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10_000)
    store.put(name(1), [bytes(1000)])
    unfinished = tmp_path / f"unfinished-{7:032x}"
    unfinished.write_bytes(bytes(5000))
    (tmp_path / "taken").write_text("9999")  # the writer had taken room
    assert store.put(name(2), [bytes(1000)])
    assert not unfinished.exists()
    assert store.has(name(1))
    assert store.has(name(2))
    assert store.statistics().num_bytes == count_bytes(tmp_path)


ODD_COUNTS = (
    *(b"", b"nonsense", b"-5", b"NaN", b"1e999", b"7.5", b"\0" * 32, bytes(range(256)), b"1_0"),
    *(b"9" * 32, b"9" * 400, b"9" * 5000, b"4000" + b" " * 28 + b"9" * 400),
)


@pytest.mark.parametrize("content", ODD_COUNTS, ids=lambda content: repr(content[:12]))
@pytest.mark.parametrize("is_running", [False, True])
def test_a_damaged_count_is_made_again(content: bytes, is_running: bool, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10_000)
    store.put(name(1), [bytes(4000)])
    (tmp_path / "taken").write_bytes(content)
    if not is_running:
        store = DiskStore(tmp_path, 10_000)
    assert 0 <= store.statistics().num_bytes <= 10_000
    for number in range(2, 8):
        assert store.put(name(number), [bytes(3000)])
        assert count_bytes(tmp_path) == store.statistics().num_bytes <= 10_000
    assert (tmp_path / "taken").stat().st_size == 32


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "dangling"])
@pytest.mark.parametrize("is_running", [False, True])
def test_something_else_in_the_place_of_the_count_is_replaced(
    kind: str, is_running: bool, tmp_path: Path
) -> None:
    folder, other = tmp_path / "cache", tmp_path / "other"
    other.write_bytes(b"of somebody else")
    store = DiskStore(folder, 10_000)
    (folder / "taken").unlink()
    if kind == "pipe":
        os.mkfifo(folder / "taken")
    elif kind == "folder":
        (folder / "taken").mkdir()
    else:
        (folder / "taken").symlink_to(other if kind == "link" else tmp_path / "nothing")
    if not is_running:
        store = DiskStore(folder, 10_000)
    assert store.statistics().num_bytes == 0
    assert store.put(name(1), [bytes(4000)])
    assert store.statistics().num_bytes == count_bytes(folder)
    assert other.read_bytes() == b"of somebody else"


def count_read_bytes() -> int:
    """Return how many bytes this process has read from files so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def test_what_is_larger_than_its_entry_is_not_read(tmp_path: Path) -> None:
    """A sparse file takes no room on the disk, and minutes to read."""
    store = DiskStore(tmp_path, 2**40)
    for number, size in enumerate((2**24, 2**34)):
        store.put(name(number), [b"some content"])
        path = find_file(tmp_path, name(number))
        os.truncate(path, size)
        before = count_read_bytes()
        assert store.get(name(number)) is None
        assert count_read_bytes() - before < 2**20
        assert not path.exists()
    # A head that fits: the reader's own bound holds.
    content = memoryview(bytes(2**22))
    assert store.put(name(9), [content])
    before = count_read_bytes()
    assert store.get(name(9), 2**20) is None
    assert count_read_bytes() - before < 2**20
    assert store.statistics().num_damaged == 3


def test_an_entry_that_would_not_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MAX_ENTRY_BYTES", 1000)
    store = DiskStore(tmp_path, 2**20)
    assert not store.put(name(1), [bytes(937)])
    assert store.put(name(1), [bytes(936)])


def test_a_folder_in_the_place_of_an_entry_is_only_absent(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, MIB)
    (tmp_path / name(1)[:2] / f"{name(1)}.entry").mkdir(parents=True)
    num_files = len(os.listdir("/proc/self/fd"))
    assert store.get(name(1)) is None
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert store.put(f"{2:064x}.layout-v1", [b"writing goes on"])


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    """A user may have named a directory that has other things in it."""
    elsewhere = tmp_path / "elsewhere"
    directory = tmp_path / "home"
    for path in (
        directory / "thesis.docx",
        directory / "unfinished-thesis.docx",
        directory / "ca" / "notes.txt",
        elsewhere / f"aa{1:062x}.layout-v1.entry",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(5000))
        os.utime(path, (1, 1))
    (directory / "aa").symlink_to(elsewhere)
    (directory / "00").write_text("a file with the name of a folder")
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    store = DiskStore(directory, 4000)
    for number in range(2**256 - 5, 2**256):
        assert store.put(name(number), [bytes(1000)])
    assert store.statistics().num_bytes <= 4000
    assert [path for path in before if not path.exists()] == []


def test_entries_beyond_the_room_go_at_the_start(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10_000)
    for number in range(5):
        store.put(name(number), [bytes(1000)])
    assert DiskStore(tmp_path, 3000).statistics().num_bytes == count_bytes(tmp_path) <= 3000


def test_a_writer_that_holds_the_lock_stops_no_other_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_LOCK_S", 0.05)
    store, other = DiskStore(tmp_path, MIB), DiskStore(tmp_path, MIB)
    store.put(name(1), [b"content"])
    store.put(name(3), [b"whole"])
    find_file(tmp_path, name(1)).write_bytes(b"damaged")
    with other._locked():
        assert store.get(name(1)) is None
        assert not store.put(name(2), [b"more"])
        late = DiskStore(tmp_path, MIB)  # a server must start all the same
        assert late.get(name(3)) == b"whole"
    assert store.statistics().num_errors == 1
    store._paused_until = 0.0
    assert store.put(name(2), [b"more"])


def test_room_reserved_by_another_writer_is_not_given_away(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path, 1000), DiskStore(tmp_path, 1000)
    file = other._reserve(tmp_path / f"unfinished-{7:032x}", 900)
    assert file is not None
    assert not store.put(name(1), [bytes(500)])
    assert store.statistics().num_oversize == 1
    os.close(file)  # the other is dead
    assert store.put(name(1), [bytes(500)])


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "cache", MIB)
    store.put(name(1), [b"content"])
    shutil.rmtree(tmp_path / "cache")
    assert store.get(name(1)) is None
    assert store.put(name(1), [b"content"])
    assert store.get(name(1)) == b"content"


def test_a_touched_entry_stays(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10_000)
    for number in range(9):
        store.put(name(number), [bytes(1000)])
        os.utime(find_file(tmp_path, name(number)), (number + 1, number + 1))
    store.touch(name(0))
    store.touch(name(99))
    store.put(name(9), [bytes(1000)])
    assert store.has(name(0))
    assert not store.has(name(1))


WRITER = """
import sys
from pathlib import Path
from sensorium.multimodal.tiers.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), 200_000)
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 150):
    store.put(f"{number:064x}.layout-v1", [bytes([number % 251]) * 4000])
    found = store.get(f"{number:064x}.layout-v1")
    assert found is None or found == bytes([number % 251]) * 4000
assert not store.statistics().num_damaged
print("done", flush=True)
"""


def start_writer(directory: Path, first: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory), str(first)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_several_processes_keep_one_limit(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, first) for first in (0, 100, 1000)]  # the first two overlap
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    store, most = DiskStore(tmp_path, 200_000), 0
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    while any(writer.poll() is None for writer in writers):
        with store._locked():  # without it files come and go while they are counted
            most = max(most, sum(num_bytes for _, num_bytes, _ in store._list_files()))
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    # A file that is renamed while the directory is listed may be found under both names.
    assert 100_000 < most <= 200_000 + len(writers) * 4_200
    for writer in writers:
        writer.communicate()


def test_killed_writers_leave_a_store_that_works(tmp_path: Path) -> None:
    for first in range(0, 400, 100):
        writer = start_writer(tmp_path, first)
        assert writer.stdout is not None
        assert writer.stdin is not None
        writer.stdout.readline()
        writer.stdin.write("\n")
        writer.stdin.flush()
        time.sleep(0.005 * first / 100)
        writer.kill()
        writer.communicate()
    store = DiskStore(tmp_path, 200_000)
    found = [store.get(name(number)) for number in range(550)]
    assert store.statistics().num_damaged == 0
    assert all(each is None or each == bytes([n % 251]) * 4000 for n, each in enumerate(found))
    for number in range(1000, 1100):
        assert store.put(name(number), [bytes(4000)])
        assert count_bytes(tmp_path) <= 200_000


FULL_DISK = """
import resource, sys
from pathlib import Path
from sensorium.multimodal.tiers.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), 2**20)
assert store.put("aa" * 32 + ".layout-v1", [bytes(100)])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
assert not store.put("bb" * 32 + ".layout-v1", [bytes(10_000)])
assert store.statistics().num_errors == 1
assert store.get("aa" * 32 + ".layout-v1") == bytes(100), "reading goes on"
assert not store.put("cc" * 32 + ".layout-v1", [bytes(10)]), "writing pauses"
assert store.statistics().num_errors == 1, "without another error"
store._paused_until = 0.0
assert store.put("cc" * 32 + ".layout-v1", [bytes(10)])
"""


def test_a_disk_that_refuses_a_write_loses_only_that_entry(tmp_path: Path) -> None:
    """The limit on the size of files is a real refusal of the system, as of a full disk."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Requests continue without it" in done.stderr
    assert done.stderr.count("Requests continue") == 1
    assert not list(tmp_path.glob("unfinished-*"))
    assert DiskStore(tmp_path, MIB).statistics().num_bytes == count_bytes(tmp_path)


def test_a_place_that_is_no_directory_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"disk cache of media.*can't be used"):
        DiskStore(tmp_path / "file", MIB)
    with pytest.raises(ModelError, match=r"disk cache of media.*can't be used"):
        DiskStore(tmp_path / "file" / "below", MIB)


def test_a_path_that_cannot_be_looked_at_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at a file may fail with more errors than that it is absent, for example EIO."""
    store = DiskStore(tmp_path, MIB)
    store.put(name(1), [b"content"])

    def fail(*_given: object, **_options: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "stat", fail)
    monkeypatch.setattr(os, "lstat", fail)
    assert not store.has(name(1))
    assert not store.put(name(1), [b"content"])
    assert store.statistics().num_errors == 1
    monkeypatch.undo()
    assert store.get(name(1)) == b"content"
