"""The files of a command line: those that are named, and those below directories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sensorium.cli.speech.audio_folders import find_audio_files
from sensorium.cli.speech.transcript_writer import AudioFile


def make_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_audio_files_below_a_directory_are_found_in_the_order_of_their_names(here: Path) -> None:
    make_files(here, "d/b.wav", "d/a.MP4", "d/x/c.opus", "d/e/f/g.flac", "d/.h.wav", "d/.i/j.wav")
    make_files(here, "other.wav", "elsewhere/k.wav")
    (here / "d" / "link").symlink_to(here / "elsewhere")
    (here / "d" / "loop").symlink_to(here / "d")
    found = find_audio_files(["other.wav", "d/", "-", "http://a/b.wav"])
    names = ["other.wav", "d/a.MP4", "d/b.wav", "d/e/f/g.flac", "d/x/c.opus", "-", "http://a/b.wav"]
    assert [audio.name for audio in found.audios] == names
    assert (found.problems, found.notes) == ([], [])
    targets = [audio.get_target("srt") for audio in found.audios]
    assert targets == ["other.srt", "a.srt", "b.srt", "e/f/g.srt", "x/c.srt", "stdin.srt", "b.srt"]


def test_a_pipe_in_a_directory_is_not_waited_for(here: Path) -> None:
    make_files(here, "d/a.wav")
    os.mkfifo(here / "d" / "b.wav")
    found = find_audio_files(["d"])
    assert [audio.name for audio in found.audios] == ["d/a.wav"]
    assert found.problems == ["d/b.wav: is no regular file"]
    assert find_audio_files(["d/b.wav"]).problems == [], (
        "one that is named is read, as with <(command)"
    )


def test_a_file_that_is_named_twice_is_found_once(here: Path) -> None:
    make_files(here, "a.wav", "b.wav")
    found = find_audio_files(["b.wav", ".", "./a.wav", "b.wav"])
    assert found.audios == [AudioFile("b.wav"), AudioFile("./a.wav", folder=".")]


def test_files_that_are_left_out_are_reported(here: Path) -> None:
    make_files(here, "d/a.wav", "d/1.txt")
    assert find_audio_files(["d"]).notes == [
        "d: 1 file is left out, not named like audio or video: 1.txt"
    ]
    make_files(here, "d/2.jpg", "d/e/3", "d/e/4.pdf")
    (note,) = find_audio_files(["d"]).notes
    assert note == "d: 4 files are left out, not named like audio or video: 1.txt, 2.jpg, e/3, ..."


def test_a_directory_without_audio_is_reported_and_costs_the_others_nothing(here: Path) -> None:
    make_files(here, "empty/notes.txt", "model/config.json", "a.wav")
    found = find_audio_files(["empty", "missing.wav", "a.wav", "model"])
    assert found.audios == [AudioFile("a.wav")]
    assert found.problems == [
        "empty: the directory has no audio and no videos",
        "missing.wav: can't be read: No such file or directory",
        "model: the directory has no audio and no videos: a model is named with --model",
    ]
    assert found.notes == []
