"""Folders of real models are whole or absent, and files have the hashes they should. No network."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from real_models.fetching import (
    UnreachableError,
    WrongFileError,
    _run,
    check_hash,
    get_cache_directory,
    make_once,
)


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENSORIUM_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert get_cache_directory() == Path.home() / ".cache" / "sensorium" / "real"
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert get_cache_directory() == Path("/shared/sensorium/real")
    monkeypatch.setenv("SENSORIUM_CACHE_DIR", "/own")
    assert get_cache_directory() == Path("/own/real")


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def recipe(directory: Path, scratch: Path) -> None:
        made.append(directory)
        directory.mkdir()
        (scratch / "on-the-way").touch()
        (directory / "model").touch()

    first = make_once("name", recipe, tmp_path / "cache")
    assert make_once("name", recipe, tmp_path / "cache") == first
    assert len(made) == 1
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["name", "model"]


def test_a_recipe_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def recipe(directory: Path, scratch: Path) -> None:
        directory.mkdir()
        (scratch / "half").touch()
        raise UnreachableError("no network")

    with pytest.raises(UnreachableError):
        make_once("name", recipe, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_second_process_uses_what_the_first_has_made(tmp_path: Path) -> None:
    def recipe(directory: Path, _: Path) -> None:
        directory.mkdir()
        (tmp_path / "name").mkdir()
        (tmp_path / "name" / "of the first").touch()

    found = make_once("name", recipe, tmp_path)
    assert [path.name for path in found.iterdir()] == ["of the first"]


def test_another_hash_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    check_hash(path, hashlib.sha256(b"content").hexdigest())
    with pytest.raises(WrongFileError, match="file has the sha256"):
        check_hash(path, hashlib.sha256(b"other").hexdigest())


def test_a_command_that_fails_is_named_with_its_reason() -> None:
    with pytest.raises(UnreachableError, match="package: no such host"):
        _run(["sh", "-c", "echo no such host >&2; exit 1"], "package")
