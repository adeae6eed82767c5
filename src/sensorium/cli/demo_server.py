"""The demo's own server, which is `sensorium serve` in another process, and a client for it.

The server ends with the process that started it, however that ends: its standard input is a pipe,
and only the starting process holds the other end.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import httpx

from sensorium.cli.keys import VARIABLE
from sensorium.embedded.samples import SampleMedia
from sensorium.types.errors import SensoriumError

_PROGRAM = "from sensorium.cli.demo_server import serve_while_wanted; serve_while_wanted()"
_FLAGS = (
    *("--port", "0", "--no-access-log", "--log-level", "warning", "--shutdown-timeout", "1"),
    # There are few requests, one at a time. Processes for media would only take cores to start.
    *("--mm-processor-pool-size", "0"),
)
_READY = re.compile(r"Sensorium is ready: (http://\S+)")
_START_S = 300.0
_STOP_S = 15.0
_ANSWER_S = 300.0


class DemoFailedError(SensoriumError):
    """The demo's server can't be started or does not answer."""


class DemoRefusedError(DemoFailedError):
    """The server refuses a question with status 400, such as media the model does not support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The server's answer to one question, with its time and its trace."""

    text: str
    seconds: float  # from the question to the answer's end
    trace: dict[str, Any]  # the server's `sensorium_trace`


class DemoServer:
    """A `sensorium serve` process, from the creation of this context manager to its exit."""

    def __init__(self, model: str) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        own = {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        # The demo's server needs no key, so it does not get that of the user's own server.
        others = {name: value for name, value in os.environ.items() if name != VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, "serve", model, *_FLAGS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=others | own,
            start_new_session=True,  # so that a terminal sends its signals to this process only
            text=True,
            errors="replace",
        )
        self._lines: list[str] = []
        self._is_settled = threading.Event()  # the server is ready, or has ended
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.append(line.rstrip())
            if _READY.search(line):
                self._is_settled.set()
        self._is_settled.set()

    def wait_until_ready(self) -> str:
        """Return the ready server's URL, or raise a `DemoFailedError` if it ends or is late."""
        if not self._is_settled.wait(_START_S):
            raise DemoFailedError(
                f"the server was not ready after {_START_S:.0f} s: `sensorium serve` shows its log"
            )
        found = next(filter(None, map(_READY.search, self._lines)), None)
        if found is None:
            last = (
                self._lines[-1]
                if self._lines
                else "the server ended before it was ready, and logged nothing"
            )
            raise DemoFailedError(last.removeprefix("sensorium: "))
        return found[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        finally:
            self._process.kill()  # its own children end with it
            self._process.wait()
            self._reader.join(_STOP_S)
            if self._process.stdout is not None and not self._reader.is_alive():
                self._process.stdout.close()


class DemoClient:
    """An HTTP client that asks a server questions about media, to be used as a context manager."""

    def __init__(self, url: str, *, max_tokens: int = 32) -> None:
        self._max_tokens = max_tokens
        self._client = httpx.Client(base_url=url, timeout=_ANSWER_S, trust_env=False)

    def connect(self) -> None:
        """Open the connection in advance, so that it does not count as time of the first answer."""
        with _blaming_server():
            self._client.get("/health").raise_for_status()

    def ask(
        self, media: Sequence[SampleMedia], question: str, *, on_text: Callable[[str], None]
    ) -> Answer:
        """Ask a question about media, and return the whole answer with its time.

        Each piece of text is passed to `on_text` as soon as it arrives. An empty `question` sends
        only the media. Raise a `DemoRefusedError`, before any text, if the server refuses the
        question, and a `DemoFailedError` for any other failure.
        """
        content = [_make_part(item) for item in media]
        if question:
            content.append({"type": "text", "text": question})
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "stream": True,
            "trace": True,
        }
        texts: list[str] = []
        trace: dict[str, Any] = {}
        start = time.perf_counter()
        with (
            _blaming_server(),
            self._client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code == httpx.codes.BAD_REQUEST:
                raise DemoRefusedError(_get_message(response.read()))
            if response.status_code != httpx.codes.OK:
                raise DemoFailedError(_get_message(response.read()))
            for chunk in _read_chunks(response):
                trace = chunk.get("sensorium_trace") or trace
                for choice in chunk.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        texts.append(text)
                        on_text(text)
        seconds = time.perf_counter() - start
        return Answer(text="".join(texts), seconds=seconds, trace=trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()


@contextmanager
def _blaming_server() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise DemoFailedError(f"the server does not answer: {error}") from error


def _make_part(item: SampleMedia) -> dict[str, Any]:
    encoded = base64.b64encode(item.path.read_bytes()).decode()
    name = f"{item.modality}_url"
    return {"type": name, name: {"url": f"data:{item.media_type};base64,{encoded}"}}


def _read_chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        payload = line.removeprefix("data: ")
        if payload == line or payload == "[DONE]":
            continue
        chunk: dict[str, Any] = json.loads(payload)
        if "error" in chunk:
            raise DemoFailedError(chunk["error"]["message"])
        yield chunk


def _get_message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:300].decode(errors="replace")


def serve_while_wanted() -> None:
    """Run the `sensorium` command in this process, and stop it when standard input is closed."""
    from sensorium.cli import main

    threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    main()


def _stop_at_end_of_input() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
