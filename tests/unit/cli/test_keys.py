"""The keys of a server come from flags, a file or a variable, and are shown by none of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sensorium import cli
from sensorium.cli import serve
from sensorium.cli.keys import VARIABLE, get_client_key, take_keys
from sensorium.server.options import ServeOptions
from sensorium.types.errors import ModelError


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def write(path: Path, content: str, mode: int = 0o600) -> str:
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def parse(monkeypatch: pytest.MonkeyPatch, *words: str) -> ServeOptions:
    monkeypatch.setattr(sys, "argv", ["sensorium", *words])
    return serve.make_options(cli._parse_arguments())


@pytest.mark.parametrize("command", ["serve", "render"])
def test_a_file_has_a_key_in_each_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    path = write(tmp_path / "keys", "first\r\n\n  second \nthird\nschlüssel\nfirst\n")
    options = parse(monkeypatch, command, "m", "--api-key-file", path)
    assert options.api_key == ("first", "second", "third", "schlüssel")
    options = parse(monkeypatch, command, "m", "--api-key-file", path, "--api-key", "fourth")
    assert options.api_key[:2] == ("fourth", "first")
    assert "first" not in repr(options)


def test_a_file_may_be_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"piped\n")
    os.close(writing)
    assert take_keys((), f"/proc/self/fd/{reading}", []) == ("piped",)
    os.close(reading)


def test_the_variable_counts_if_nothing_else_is_given_and_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for given, path, keys in (
        ((), None, ("own", "another")),
        (("flag",), None, ("flag",)),
        ((), write(tmp_path / "keys", "filed"), ("filed",)),
    ):
        monkeypatch.setenv(VARIABLE, "own\nanother\n")
        assert take_keys(given, path, []) == keys
        assert VARIABLE not in os.environ  # so that no process that is started has it
    assert take_keys((), None, []) == ()


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_no_key_where_one_is_expected_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    path = write(tmp_path / "keys", content)
    with pytest.raises(ModelError, match=r"the file .*keys of --api-key-file is empty"):
        take_keys((), path, [])
    monkeypatch.setenv(VARIABLE, content)
    with pytest.raises(ModelError, match="the variable SENSORIUM_API_KEY is empty"):
        take_keys((), None, [])
    with pytest.raises(ModelError, match="the key of --api-key is empty"):
        take_keys((content,), None, [])


def test_a_file_that_can_not_be_read_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"secret\xff")
    for path, reason in (
        (tmp_path / "nowhere", "can't be read: No such file or directory"),
        (tmp_path, "can't be read: Is a directory"),
        (binary, "is no text in UTF-8"),
        (write(tmp_path / "large", "secret" * 2**18), "is larger than a mebibyte"),
        (write(tmp_path / "zeros", "secret\0\0"), "has a key with characters that can't be sent"),
        (Path("/dev/zero"), "is larger than a mebibyte"),
    ):
        with pytest.raises(SystemExit) as ended:
            parse(monkeypatch, "serve", "m", "--api-key-file", str(path))
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"the file {path} of --api-key-file {reason}" in said
        assert "secret" not in said


def test_only_ends_of_lines_separate_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes("\ufeffone\r\ntwo\xa0half\n".encode())
    with pytest.raises(ModelError, match="characters that can't be sent"):
        take_keys((), str(path), [])
    path.write_bytes("\ufeffone\r\ntwo three\rfour\n".encode())
    assert take_keys((), str(path), []) == ("one", "two three", "four")


def test_a_key_file_that_all_users_may_read_is_warned_of(tmp_path: Path) -> None:
    notes: list[str] = []
    assert take_keys((), write(tmp_path / "own", "secret", 0o640), notes) == ("secret",)
    assert notes == []
    open_path = write(tmp_path / "open", "secret", 0o644)
    assert take_keys((), open_path, notes) == ("secret",)
    (note,) = notes
    assert f"every user of this machine can read the keys in {open_path}" in note
    assert "secret" not in note


def test_a_client_takes_the_variable_of_the_server_before_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert get_client_key(None, "OPENAI_API_KEY") is None
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    assert get_client_key(None, "OPENAI_API_KEY") == "other"
    monkeypatch.setenv(VARIABLE, " own words \nsecond\n")
    assert get_client_key(None, "OPENAI_API_KEY") == "own words"
    assert get_client_key("given", "OPENAI_API_KEY") == "given"
