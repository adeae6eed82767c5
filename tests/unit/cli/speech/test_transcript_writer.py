"""Texts of several files come at any time, and are written in the order of the files."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from sensorium import RequestError
from sensorium.cli.speech.transcript_writer import AudioFile, TranscriptWriter

AUDIO_FILES = [AudioFile("a.wav"), AudioFile("b.wav"), AudioFile("c.wav")]


class Output(io.StringIO):
    """A stream that may be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture(params=[False, True], ids=["pipe", "terminal"])
def output(request: pytest.FixtureRequest) -> Output:
    return Output(is_terminal=request.param)


def test_later_files_wait_for_earlier_ones(
    output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    with redirect_stdout(output):
        writer = TranscriptWriter(AUDIO_FILES, "text", None, is_headed=True)
        line = "\n" if output.isatty() else ""
        writer.add_text(1, " Good")
        writer.add_text(0, " Hello ")
        first = f"==> a.wav <==\nHello{line}"
        assert output.getvalue() == first
        writer.add_text(1, " night.")
        writer.finish(1, "Good night.\n")
        writer.fail(2, "it is no sound")
        assert output.getvalue() == first
        writer.add_text(0, "world. ")
        writer.finish(0, "Hello world. Again.\n")  # its end is in no segment
        rest = "world.\nAgain.\n" if output.isatty() else " world. Again.\n"
        second = "Good\nnight.\n" if output.isatty() else "Good night.\n"
        assert output.getvalue() == f"{first}{rest}\n==> b.wav <==\n{second}"
        assert (writer.num_failed, capsys.readouterr().err) == (
            1,
            "sensorium: c.wav: it is no sound\n",
        )


def test_text_before_an_error_ends_with_its_line(output: Output) -> None:
    with redirect_stdout(output):
        writer = TranscriptWriter(AUDIO_FILES[:2], "text", None, is_headed=True)
        writer.add_text(0, "Hello")
        writer.fail(0, "it broke")
        writer.finish(1, "Good night.\n")
        assert output.getvalue() == "==> a.wav <==\nHello\n\n==> b.wav <==\nGood night.\n"


def test_other_formats_are_written_whole(output: Output) -> None:
    with redirect_stdout(output):
        writer = TranscriptWriter(AUDIO_FILES[:1], "srt", None, is_headed=False)
        writer.add_text(0, "Hello")
        assert output.getvalue() == ""
        writer.finish(0, "1\n...")
        assert output.getvalue() == "1\n..."


@pytest.mark.parametrize(
    ("name", "target"),
    [("x/talk.mp3", "talk.srt"), ("-", "stdin.srt"), ("talk", "talk.srt"), ("a.b.wav", "a.b.srt")],
)
def test_a_transcript_is_named_after_its_audio(name: str, target: str) -> None:
    assert AudioFile(name).get_target("srt") == target


def test_a_directory_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RequestError, match=r"the directory .*file/x can't be made: Not a directory"
    ):
        TranscriptWriter(AUDIO_FILES, "text", str(tmp_path / "file" / "x"), is_headed=True)


def test_a_transcript_that_can_not_be_written_costs_the_others_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.txt").mkdir()
    writer = TranscriptWriter(AUDIO_FILES, "text", str(tmp_path), is_headed=True)
    for index in range(len(AUDIO_FILES)):
        writer.finish(index, f"Text {index}.\n")
    assert [(tmp_path / f"{name}.txt").read_text() for name in "ac"] == ["Text 0.\n", "Text 2.\n"]
    assert writer.num_failed == 1
    problem = f"sensorium: b.wav: {tmp_path / 'b.txt'} can't be written: Is a directory\n"
    assert capsys.readouterr().err == problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory_is_named_before_any_transcription(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RequestError, match="can't be written to: Permission denied"):
        TranscriptWriter(AUDIO_FILES, "text", str(tmp_path), is_headed=True)
