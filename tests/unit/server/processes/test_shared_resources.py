"""What the processes of a server share is made before them and gone after them."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import closing
from pathlib import Path

import pytest

from sensorium.engine.assembly.options import MediaOptions
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.server.options import ServeOptions
from sensorium.server.processes.shared_resources import Address, sharing_resources
from sensorium.types.errors import RequestError


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_directory_is_private_and_is_removed_with_the_server() -> None:
    with sharing_resources(ServeOptions(port=0)) as shared_resources:
        assert stat.S_IMODE(shared_resources.directory.stat().st_mode) == 0o700
        assert shared_resources.metrics_directory.is_dir()
    assert not shared_resources.directory.exists()


def test_an_unwritable_directory_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    reason = r"metrics can't be stored in the temporary directory"
    with pytest.raises(RequestError, match=reason), sharing_resources(ServeOptions(port=0)):
        pass


def test_paths_of_sockets_stay_short_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with (
        sharing_resources(ServeOptions(port=0)) as shared_resources,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(str(shared_resources.directory / "core-1234.sock"))
    assert not list(deep.iterdir())


def test_connections_are_refused_before_a_frontend_listens() -> None:
    with closing(Address.bind("127.0.0.1", 0)) as own:
        address = own.listener.getsockname()
        assert own.url == f"http://127.0.0.1:{address[1]}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


def test_the_shared_memory_is_ready_for_those_who_inherit_it() -> None:
    media = MediaOptions(mm_processor_cache_type="shm", mm_processor_cache_gb=1 / 1024)
    with sharing_resources(ServeOptions(port=0, media=media)) as shared_resources:
        assert shared_resources.shm_fd is not None
        assert os.fstat(shared_resources.shm_fd).st_size >= 2**20
        with closing(ShmStore.attach(shared_resources.shm_fd)) as store:
            assert store.statistics().capacity_bytes == 2**20
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(shared_resources.shm_fd)


def test_a_failure_while_resources_are_made_leaves_nothing(temporary: Path) -> None:
    media = MediaOptions(mm_processor_cache_type="shm", mm_processor_cache_gb=2**19)
    options = ServeOptions(port=0, media=media)
    reason = "the shared-memory cache can't reserve .*smaller mm_processor_cache_gb"
    with pytest.raises(RequestError, match=reason), sharing_resources(options):
        pass
    assert not list(temporary.iterdir())


def test_an_invalid_address_is_named() -> None:
    with pytest.raises(RequestError, match=r"'999\.1\.1\.1' is no address"):
        Address.bind("999.1.1.1", 0)
