"""Files are read below the allowed directory, and nothing can be learnt about the others."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from sensorium.multimodal.fetching import loader
from sensorium.multimodal.fetching.loader import read_local_file
from sensorium.types.errors import MediaFetchError, RequestError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An allowed directory `media`, next to a secret and a directory of nearly the same name."""
    root = tmp_path / "media"
    (root / "below").mkdir(parents=True)
    (root / "below" / "a cat.png").write_bytes(b"picture")
    (root / "empty.png").write_bytes(b"")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media-private").mkdir()
    (tmp_path / "media-private" / "file").write_bytes(b"secret")
    (root / "link out").symlink_to(tmp_path / "secret")
    (root / "relative link out").symlink_to("../secret")
    (root / "directory out").symlink_to(tmp_path / "media-private")
    (root / "link in").symlink_to(root / "below" / "a cat.png")
    (root / "loop").symlink_to(root / "loop")
    (root / "dangling").symlink_to(root / "nowhere")
    os.mkfifo(root / "fifo")
    (root / "device").symlink_to("/dev/zero")
    return root


def read(root: Path, name: str, max_bytes: int = 100) -> bytes:
    return read_local_file(f"file://{root}/{name}", root, max_bytes)


@pytest.mark.parametrize(
    "name",
    ["below/a cat.png", "below/a%20cat.png", "link in", "below/../below/./a%20cat.png?x#y"],
)
def test_a_file_below_the_allowed_directory_is_read(root: Path, name: str) -> None:
    assert read(root, name) == b"picture"


@pytest.mark.parametrize("start", ["file://", "file://localhost", "file:", "FILE://LocalHost"])
def test_the_host_of_a_file_is_this_machine(root: Path, start: str) -> None:
    source = f"{start}{root}/below/a%20cat.png"
    assert read_local_file(source, allowed_path=root, max_bytes=100) == b"picture"


def test_the_allowed_directory_may_itself_be_reached_by_a_link(root: Path) -> None:
    alias = root.parent / "alias"
    alias.symlink_to(root)
    for directory in (alias, root):
        source = f"file://{directory}/below/a cat.png"
        assert read_local_file(source, allowed_path=alias, max_bytes=100) == b"picture"


@pytest.mark.parametrize(
    "name",
    [
        "missing.png",
        "../secret",
        "%2e%2e/secret",
        "..%2Fsecret",
        "below/../../secret",
        "../media-private/file",
        "link out",
        "relative link out",
        "directory out/file",
        "loop",
        "dangling",
        "fifo",
        "device",
        "below",
        "",
        ".",
        "below/a cat.png/more",
        "x" * 5000,
        "a%00b",
        "../../../../../../../../etc/passwd",
    ],
)
def test_every_other_file_has_the_same_answer(root: Path, name: str) -> None:
    with pytest.raises(MediaFetchError) as caught:
        read(root, name)
    assert str(caught.value) == (
        "the local file can't be read: it is missing, not a file, or not in the allowed directory"
    )
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "source",
    [
        "file://other.example/a",
        "file:a",
        "file://",
        "file://[/a",
        "file:///\ud800",
        "file:///" + "a" * 20_000,
    ],
)
def test_a_malformed_url_is_the_caller_s_fault(root: Path, source: str) -> None:
    with pytest.raises(RequestError, match="file URL") as caught:
        read_local_file(source, allowed_path=root, max_bytes=100)
    assert not isinstance(caught.value, MediaFetchError)


def test_no_file_is_read_unless_a_directory_is_allowed(root: Path) -> None:
    source = f"file://{root}/below/a cat.png"
    with pytest.raises(MediaFetchError, match="reads no local files"):
        read_local_file(source, allowed_path=None, max_bytes=100)
    with pytest.raises(MediaFetchError, match="can't be read"):
        read_local_file(source, allowed_path=root / "missing", max_bytes=100)


def test_the_cap_is_exact(root: Path) -> None:
    assert read(root, "below/a cat.png", max_bytes=7) == b"picture"
    with pytest.raises(MediaFetchError, match="larger than 6 bytes"):
        read(root, "below/a cat.png", max_bytes=6)


@pytest.mark.parametrize("part", ["below", "below/a cat.png"])
def test_a_link_made_after_the_check_leads_nowhere(
    root: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    resolve = os.path.realpath

    def resolve_then_swap(path: object) -> str:
        resolved = resolve(str(path))
        if resolved.endswith("cat.png"):
            (root / part).rename(root / "moved")
            (root / part).symlink_to(root / "moved")
        return resolved

    monkeypatch.setattr(loader.os.path, "realpath", resolve_then_swap)
    with pytest.raises(MediaFetchError, match="can't be read"):
        read(root, "below/a cat.png")


def test_nothing_stays_open(root: Path) -> None:
    """Of this folder: whatever else this process opens and closes meanwhile."""
    for name in ("below/a cat.png", "missing", "below/missing", "fifo", "below", ""):
        try:
            read(root, name)
        except MediaFetchError:
            continue
    assert not [path for path in list_open_paths() if path.startswith(str(root.parent))]
    with (root / "below" / "a cat.png").open():
        assert [path for path in list_open_paths() if path.startswith(str(root.parent))]


def list_open_paths() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found
