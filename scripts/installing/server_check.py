"""Starts the server of an installed package with the embedded model, and asks about its samples.

Uses nothing but the standard library and the installed command: what is tested is the installation,
from a folder outside of the checkout.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_READY = re.compile(r"Sensorium is ready: (http://127\.0\.0\.1:\d+)")
_START_TIMEOUT_S = 600.0
_ANSWER_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 120.0
_MAX_LINES = 60  # of the server's output in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A sample that comes with the package, a question about it, and the right answer."""

    kind: str
    file: str
    text: str
    answer: str

    def make_part(self, data: bytes) -> dict[str, object]:
        """Return the part of a chat message that has the sample's bytes."""
        encoded = base64.b64encode(data).decode()
        if self.kind == "sound":
            return {"type": "input_audio", "input_audio": {"data": encoded, "format": "flac"}}
        name, media_type = {
            "picture": ("image_url", "image/png"),
            "video": ("video_url", "video/mp4"),
        }[self.kind]
        return {"type": name, name: {"url": f"data:{media_type};base64,{encoded}"}}


QUESTIONS = (
    Question(
        kind="picture",
        file="shapes.png",
        text="What is this?",
        answer="A red circle and a blue square.",
    ),
    Question(kind="sound", file="speech.flac", text="What was said?", answer="seven green birds"),
    Question(kind="video", file="moving.mp4", text="Which way does it move?", answer="Right."),
)


class InstallError(Exception):
    """An installation does not work; the message has the reason."""


def check_server(command: list[str], media: Path, folder: Path) -> dict[str, str]:
    """Return the answer to each question, by kind. Raise `InstallError` if one is wrong.

    `command` starts the server, `media` has the installed samples, and `folder` is where the server
    runs and keeps its expanded model.
    """
    answers: dict[str, str] = {}
    with _run_server(command, folder) as url:
        for question in QUESTIONS:
            answers[question.kind] = answer = ask(url, question, media)
            if answer != question.answer:
                raise InstallError(
                    f"the answer about the {question.kind} is {answer!r}, "
                    f"and should be {question.answer!r}"
                )
    return answers


def ask(url: str, question: Question, media: Path) -> str:
    """Return the server's answer to one question."""
    part = question.make_part((media / question.file).read_bytes())
    message = {"role": "user", "content": [part, {"type": "text", "text": question.text}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps({"messages": [message], "max_tokens": 48}).encode(),
        {"Content-Type": "application/json"},
    )
    # Proxies are for other machines than this one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_TIMEOUT_S) as response:
            content = json.load(response)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        raise InstallError(f"the {question.kind} was answered with {error.code}: {text}") from error
    return str(content)


@contextmanager
def _run_server(command: list[str], folder: Path) -> Iterator[str]:
    """Run the server while the block runs, and yield its URL."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["SENSORIUM_CACHE_DIR"] = str(folder / "cache")
    environment["PYTHONUNBUFFERED"] = "1"
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.stdout is None:
        raise InstallError("the server has no output")
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        yield _wait_until_ready(lines)
        process.terminate()
        status = process.wait(_STOP_TIMEOUT_S)
        if status != 0:
            raise InstallError(f"the server ended with status {status}")
    finally:
        if process.poll() is None:
            # The children end with their parent.
            process.kill()
            process.wait(_STOP_TIMEOUT_S)
        reader.join(_STOP_TIMEOUT_S)
        process.stdout.close()


def _read_lines(output: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in output:
        lines.put(line)
    lines.put(None)


def _wait_until_ready(lines: queue.Queue[str | None]) -> str:
    """Return the server's URL when it has printed it."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    seen: list[str] = []
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise InstallError(f"the server is not ready:\n{''.join(seen[-_MAX_LINES:])}") from None
        if line is None:
            raise InstallError(f"the server ended:\n{''.join(seen[-_MAX_LINES:])}")
        seen.append(line)
        found = _READY.search(line)
        if found:
            return found.group(1)
