"""Finds the files that `sensorium transcribe` gets, including those in directories.

Files below a directory are chosen by their names, because to decode every file, which would show
what it really is, costs too much.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sensorium.cli.speech.transcript_writer import AudioFile

_AUDIO = (
    *("aac", "ac3", "aif", "aifc", "aiff", "amr", "ape", "au", "caf", "flac", "m4a", "m4b", "mka"),
    *("mp2", "mp3", "mpga", "oga", "ogg", "opus", "spx", "wav", "wave", "weba", "wma", "wv"),
)
_VIDEOS = (
    *("3gp", "avi", "flv", "m2ts", "m4v", "mkv", "mov", "mp4", "mpeg", "mpg", "mts", "ogv", "ts"),
    *("webm", "wmv"),
)
_ENDINGS = frozenset(f".{ending}" for ending in (*_AUDIO, *_VIDEOS))
_MAX_NAMED = 3  # of the files that are left out


@dataclass(slots=True)
class FoundAudio:
    """The files to transcribe, and remarks about the others."""

    audios: list[AudioFile] = field(default_factory=list)  # in the order of the command line
    problems: list[str] = field(default_factory=list)  # what can't be transcribed, and why
    notes: list[str] = field(default_factory=list)  # what is left out on purpose


def find_audio_files(words: Sequence[str]) -> FoundAudio:
    """Return the files of a command line, and the audio and video files below its directories.

    A file that is named twice is returned once. The files of a directory are sorted by name, and
    come before those of its subdirectories. Hidden files and directories, and links to directories,
    are skipped.
    """
    found = FoundAudio()
    for name in dict.fromkeys(words):
        if os.path.isdir(name):
            _search(name, found)
        elif problem := AudioFile(name).find_problem():
            found.problems.append(f"{name}: {problem}")
        else:
            found.audios.append(AudioFile(name))
    by_path: dict[str, AudioFile] = {}
    for audio in found.audios:
        by_path.setdefault(os.path.normpath(audio.name), audio)
    found.audios = list(by_path.values())
    return found


def _search(folder: str, found: FoundAudio) -> None:
    audios: list[AudioFile] = []
    others: list[str] = []

    def note_error(error: OSError) -> None:
        found.problems.append(f"{error.filename}: can't be read: {error.strerror}")

    num_problems = len(found.problems)
    for here, folders, files in os.walk(folder, onerror=note_error):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        for name in sorted(name for name in files if name[0] != "."):
            path = os.path.join(here, name)
            if Path(name).suffix.lower() in _ENDINGS:
                audios.append(AudioFile(path, folder=folder))
            else:
                others.append(os.path.relpath(path, folder))
    for audio in audios:
        problem = audio.find_problem()
        if not problem and not os.path.isfile(audio.name):
            problem = "is no regular file"  # reading a pipe or a device may never end
        if problem:
            found.problems.append(f"{audio.name}: {problem}")
        else:
            found.audios.append(audio)
    if not audios and len(found.problems) == num_problems:
        is_model = "config.json" in others
        hint = ": a model is named with --model" if is_model else ""
        found.problems.append(f"{folder}: the directory has no audio and no videos{hint}")
    elif others:
        named = ", ".join(others[:_MAX_NAMED]) + ", ..." * (len(others) > _MAX_NAMED)
        files_are = "1 file is" if len(others) == 1 else f"{len(others)} files are"
        found.notes.append(
            f"{folder}: {files_are} left out, not named like audio or video: {named}"
        )
