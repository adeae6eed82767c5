"""The audio files that `sensorium transcribe` reads, and where it writes transcripts.

Text on stdout is written as it comes, in the order of the files: the text of a later file waits
until the earlier ones have ended. On a terminal each segment is a line, and the progress bar stays
below them. Elsewhere the text is the same as in the server's format "text".
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from sensorium.cli.flags import is_address
from sensorium.speech.formats import SpeechFormat, TextDeltas
from sensorium.types.errors import RequestError
from sensorium.utils.printable import make_one_line

_STDIN = "-"
_EXTENSIONS: dict[SpeechFormat, str] = {
    "text": "txt",
    "json": "json",
    "verbose_json": "json",
    "srt": "srt",
    "vtt": "vtt",
}


@dataclass(frozen=True, slots=True)
class AudioFile:
    """Audio as the command line names it: a file, an address, or `-` for stdin."""

    name: str
    folder: str = ""  # the directory in which it was found; empty: it was named itself

    def find_problem(self) -> str:
        """Return why the file can't be read, or an empty text if it probably can.

        The file is not opened, because what comes through a pipe can be read only once.
        """
        if self.name == _STDIN or is_address(self.name):
            return ""
        try:
            os.stat(self.name)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            return f"can't be read: {reason}"
        return "" if os.access(self.name, os.R_OK) else "can't be read: Permission denied"

    def get_source(self) -> Path | str | bytes:
        """Return the path of the file, the address, or all bytes of stdin."""
        if self.name == _STDIN:
            return sys.stdin.buffer.read()
        return self.name if is_address(self.name) else Path(self.name)

    def get_target(self, form: SpeechFormat) -> str:
        """Return the name of the file for the transcript: `talk.srt` for `talk.mp3`.

        The name of a file from a directory keeps its path below that: `day/talk.srt`.
        """
        if self.folder:
            path = Path(self.name).relative_to(self.folder)
            return str(path.with_suffix(f".{_EXTENSIONS[form]}"))
        stem = "stdin" if self.name == _STDIN else Path(self.name).stem
        return f"{stem}.{_EXTENSIONS[form]}"


class TranscriptWriter:
    """A writer of transcripts in one format, to stdout or to a file per transcript."""

    def __init__(
        self,
        audios: Sequence[AudioFile],
        form: SpeechFormat,
        directory: str | None,
        *,
        is_headed: bool,  # each text on stdout has the name of its file above it
    ) -> None:
        self._audios = audios
        self._form = form
        self._directory = None if directory is None else _make_directory(directory)
        self._is_headed = is_headed
        self._is_streamed = self._directory is None and form == "text"
        self._is_terminal = sys.stdout.isatty()
        self._texts: defaultdict[int, TextDeltas] = defaultdict(TextDeltas)  # by index
        self._held: defaultdict[int, str] = defaultdict(str)  # index -> what waits to be written
        self._ended: set[int] = set()
        self._current = 0  # the first file that has not ended; what comes of it is written at once
        self._num_headings = 0
        self.num_failed = 0

    def add_text(self, index: int, text: str) -> None:
        if self._is_streamed:
            self._hold(index, self._texts[index].add(text))
            self._write_held()

    def finish(self, index: int, content: str) -> None:
        """Write a file's whole transcript; if it can't be written, count the file as failed."""
        if self._directory is not None:
            if problem := self._save(self._directory, index, content):
                self.fail(index, problem)
                return
        elif self._is_streamed:
            self._hold(index, self._texts[index].finish(content.strip()))
            if not self._is_terminal:
                self._held[index] += "\n"
        else:
            self._held[index] = content
        self._end(index)

    def fail(self, index: int, reason: str) -> None:
        """Write to stderr that a file could not be transcribed, and count it."""
        self.num_failed += 1
        if self._texts[index].sent and not self._is_terminal:
            self._held[index] += "\n"  # below the text before the error
        self._end(index)
        line = make_one_line(f"{self._audios[index].name}: {reason}")
        tqdm.write(f"sensorium: {line}", file=sys.stderr)

    def _save(self, directory: Path, index: int, content: str) -> str:
        """Write a transcript to its file, and return why that failed, or an empty text."""
        path = directory / self._audios[index].get_target(self._form)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            return f"{path} can't be written: {error.strerror}"
        return ""

    def _hold(self, index: int, part: str) -> None:
        self._held[index] += f"{part.strip()}\n" if self._is_terminal and part.strip() else part

    def _end(self, index: int) -> None:
        self._ended.add(index)
        self._write_held()

    def _write_held(self) -> None:
        """Write the text of the first file that has not ended, and of those before it."""
        while self._current < len(self._audios):
            if text := self._held.pop(self._current, ""):
                self._write(self._current, text)
            if self._current not in self._ended:
                return
            self._current += 1

    def _write(self, index: int, text: str) -> None:
        if self._is_headed and self._num_headings <= index:
            blank = "\n" if self._num_headings else ""
            text = f"{blank}==> {make_one_line(self._audios[index].name)} <==\n{text}"
            self._num_headings = index + 1
        with tqdm.external_write_mode(file=sys.stdout):  # a bar is drawn again below the text
            sys.stdout.write(text)
            sys.stdout.flush()


def _make_directory(name: str) -> Path:
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"the directory {name} can't be made: {reason}") from error
    if not os.access(name, os.W_OK | os.X_OK):
        raise RequestError(f"the directory {name} can't be written to: Permission denied")
    return Path(name)
