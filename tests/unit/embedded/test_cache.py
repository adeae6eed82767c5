"""The expanded model is there, whole, whatever was there before and however many start at once."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sensorium import ModelError
from sensorium.embedded import cache as cache_module
from sensorium.embedded.cache import find_embedded_model, is_whole, read_manifest
from sensorium.models.checkpoint import find_checkpoint

ROOT = Path(__file__).parents[3]


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-10] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def lose_a_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def gain_a_file(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def get_a_pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("what?")


def become_a_loop(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder)


@pytest.mark.parametrize(
    "damage",
    [cut_short, flip_a_bit, lose_a_file, gain_a_file, get_a_pipe, become_a_file, become_a_loop],
)
def test_damaged_files_are_found_and_repaired(
    packed: Path, cache: Path, damage: Callable[[Path], None]
) -> None:
    folder = find_embedded_model(packed)
    damage(folder)
    (cache / f".{folder.name}.part").mkdir()  # of a process that was killed
    assert find_embedded_model(packed) == folder
    assert is_whole(folder, read_manifest(packed).expanded)
    assert sorted(path.name for path in cache.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_a_complete_folder_is_not_touched(packed: Path, cache: Path) -> None:
    folder = find_embedded_model(packed)
    (cache / f".{folder.name}.lock").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert find_embedded_model(packed) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in cache.iterdir()] == [folder.name]


_EXPAND = """
import sys, pathlib
from sensorium.embedded.cache import find_embedded_model
from sensorium.embedded.cache import is_whole, read_manifest
packed = pathlib.Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
folder = find_embedded_model(packed)
print(is_whole(folder, read_manifest(packed).expanded), folder, "torch" in sys.modules)
"""


@pytest.mark.processes
def test_processes_that_start_at_once_share_one_folder(packed_model: Path, cache: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _EXPAND, str(packed_model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = {process.communicate(timeout=240)[0].strip() for process in processes}
    folder = find_embedded_model(packed_model)
    assert outputs == {f"True {folder} False"}
    assert sorted(path.name for path in cache.iterdir()) == [f".{folder.name}.lock", folder.name]


@pytest.mark.usefixtures("cache")
def test_the_expanded_model_is_a_stock_checkpoint(packed_model: Path) -> None:
    import torch
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration as Model

    model, found = Model.from_pretrained(
        find_embedded_model(packed_model), output_loading_info=True
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(found.values())


def test_the_user_says_where_it_goes(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("SENSORIUM_CACHE_DIR", str(tmp_path / "own"))
    assert find_embedded_model(packed).parent == tmp_path / "own"
    monkeypatch.setenv("SENSORIUM_CACHE_DIR", "")
    assert find_embedded_model(packed).parent == tmp_path / "xdg" / "sensorium"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert find_embedded_model(packed).parent == tmp_path / "home" / ".cache" / "sensorium"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder, and a cache that can't be used."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SENSORIUM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_without_a_usable_cache_a_private_folder_is_used(
    packed: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = find_embedded_model(packed)
    assert folder.parent == temporary / f"sensorium-{os.getuid()}"
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert "can't be used (Not a directory)" in caplog.text
    assert find_embedded_model(packed) == folder


@pytest.mark.parametrize(
    ("chosen", "home"), [("~nobody-of-this-name/x", "/root"), ("", "~"), ("", "not/absolute")]
)
def test_without_a_home_directory_the_cache_is_temporary(
    packed: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    chosen: str,
    home: str,
) -> None:
    (temporary / "here").mkdir()
    monkeypatch.chdir(temporary / "here")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("SENSORIUM_CACHE_DIR", chosen)
    monkeypatch.setenv("HOME", home)  # "~" is what is found without it and without an account
    assert find_embedded_model(packed).parent == temporary / f"sensorium-{os.getuid()}"
    assert "can't be used (the home folder can't be found)" in caplog.text
    assert not list((temporary / "here").iterdir())


@pytest.mark.usefixtures("temporary")
def test_a_lock_that_leads_elsewhere_is_not_followed(
    packed: Path, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "letter").write_text("Dear friend")
    name = f"sensorium-mini-{read_manifest(packed).digest[:16]}"
    cache.mkdir()
    (cache / f".{name}.lock").symlink_to(tmp_path / "letter")
    assert find_embedded_model(packed).parent != cache
    assert (tmp_path / "letter").read_text() == "Dear friend"


def test_a_folder_that_others_may_write_to_is_refused(packed: Path, temporary: Path) -> None:
    (temporary / f"sensorium-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(ModelError, match="is not used, because other users can access it"):
        find_embedded_model(packed)


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "there is no room for sensorium-mini in"), (errno.EIO, "can't be written to")],
)
def test_a_full_disk_is_named(
    packed: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: int,
    message: str,
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache_module, "expand", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ModelError, match=message):
        find_embedded_model(packed)
    assert [path.name.endswith(".lock") for path in cache.iterdir()] == [True]


@pytest.mark.usefixtures("cache")
def test_a_damaged_package_is_named(packed: Path) -> None:
    shard = packed / "packed-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(
        ModelError, match=r"is damaged: .*00001\.safetensors': its checksum is wrong"
    ):
        find_embedded_model(packed)
    shard.unlink()
    with pytest.raises(ModelError, match=r"is damaged: .*00001\.safetensors"):
        find_embedded_model(packed)
    (packed / "manifest.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is damaged: .*manifest\.json"):
        find_embedded_model(packed)
    (packed / "manifest.json").write_text('{"packed": {}, "expanded": {}}')
    with pytest.raises(ModelError, match=r"do not match manifest\.json"):
        find_embedded_model(packed)
    (packed / "manifest.json").unlink()
    with pytest.raises(ModelError, match="has no embedded model: name another model"):
        find_embedded_model(packed)


def test_the_name_of_the_embedded_model_leads_to_its_folder(
    packed: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sensorium-mini").mkdir()
    monkeypatch.setattr(find_embedded_model, "__defaults__", (packed,))
    options: Any = {"trust_remote_code": False, "use_tqdm": False}
    assert find_checkpoint("sensorium-mini", revision=None, **options).parent == cache
    assert find_checkpoint("./sensorium-mini", revision=None, **options).parent != cache
    with pytest.raises(ModelError, match="'sensorium-mini' is the embedded model"):
        find_checkpoint("sensorium-mini", revision="main", **options)
