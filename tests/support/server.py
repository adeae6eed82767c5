"""Runs real servers for tests: `serve`, `render` or `encode`, as a user starts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.support.nursery import NurseryProcess, get_nursery

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 480.0  # long, because the machine may be busy
_MOST_ALIVE = 2  # shared servers of one test process: each takes up to 2 GiB
# Flags that servers under test have unless a test gives others. The cache's default of 4 GiB in
# shared memory takes seconds to reserve, and all processes of the machine share that memory. Each
# process of the pool loads all libraries, which is most of what a start costs; so a test asks for a
# pool (`POOL`) if what it tests has to do with media.
_DEFAULTS = (("--mm-processor-cache-gb", "0.5"), ("--mm-processor-pool-size", "0"))
_RENDER_DEFAULTS = _DEFAULTS[1:]
POOL = ("--mm-processor-pool-size", "1")
# Where the embedded model is unpacked, once for all tests of a checkout.
EMBEDDED_CACHE = str(ROOT / "build" / "embedded")
COMMAND = "from sensorium.cli import main; main()"
# A process ignores Ctrl-C if its parent does, as a shell's jobs in the background do. This one
# receives it all the same.
INTERRUPTIBLE_COMMAND = (
    f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {COMMAND}"
)
_READY = re.compile(r"Sensorium(?:'s encoder)? is ready: (http://[\w.:\[\]]+|unix:\S+)")


class ServerProcess:
    """A server in a process of its own, with the lines that it has printed so far."""

    def __init__(
        self,
        model: str,
        *flags: str,
        command: str = "serve",
        is_cold: bool = False,
        before: str = "",
        **variables: str,
    ) -> None:
        """Start the server, with `variables` added to its environment.

        A cold server loads all libraries, as when a user starts it. Others are forks of a process
        that has loaded them. They run the code `before` at first, and their children inherit what
        it has changed in the libraries.
        """
        own = {
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONUNBUFFERED": "1",
            "SENSORIUM_CACHE_DIR": EMBEDDED_CACHE,
        }
        environment = {**os.environ, **own, **variables}
        defaults = _DEFAULTS if command == "serve" else _RENDER_DEFAULTS
        added = [word for pair in defaults if pair[0] not in flags for word in pair]
        port = () if command == "encode" else ("--port", "0")
        arguments = [command, model, *port, *flags, *added]
        self.process: subprocess.Popen[str] | NurseryProcess
        if is_cold:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
                start_new_session=True,
            )
        else:
            self.process = get_nursery().start(before + COMMAND, arguments, env=environment)
        self.flags = flags
        self.lines: list[str] = []  # of stdout and stderr
        self.url: str | None = None
        self.first_metrics = ""
        self._is_said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self.process.stdout is None:
            return
        with self.process.stdout as lines:
            for line in lines:
                with self._is_said:
                    self.lines.append(line)
                    found = _READY.search(line)
                    self.url = self.url or (found.group(1) if found else None)
                    self._is_said.notify_all()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.url is None:
            if self.process.poll() is not None:
                self._reader.join(60)
                raise AssertionError(
                    f"the server ended with {self.process.returncode}:\n{self.output}"
                )
            if time.monotonic() > deadline:
                self._print_stacks()
                raise AssertionError(f"the server is not ready:\n{self.output}")
            with self._is_said:
                self._is_said.wait(0.5)

    def _print_stacks(self) -> None:
        """Make the processes of a server that does not start print their stacks, and end."""
        for pid in get_descendants(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)  # `faulthandler` prints the stack of every thread
        self._reader.join(10)

    def wait_for_output(self, words: str, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while words not in self.output:
            if time.monotonic() > deadline:
                raise AssertionError(f"the server did not say {words!r}:\n{self.output}")
            with self._is_said:
                self._is_said.wait(0.5)

    def get_url(self, path: str = "") -> str:
        if self.url is None:
            raise AssertionError("the server is not ready")
        return self.url.rstrip("/") + path

    def make_client(self, **options: Any) -> OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": 120.0, **options}
        return OpenAI(base_url=self.get_url("/v1"), **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.get_url(path), json=body, timeout=120.0, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.get_url(path), timeout=120.0, **options)

    def note_first_metrics(self) -> None:
        """Keep the metrics of the server before its first request."""
        self.first_metrics = self.get("/metrics").text

    def reset_caches(self) -> None:
        for level in ("mm", "encoder", "prefix"):
            self.post(f"/reset_{level}_cache").raise_for_status()

    def get_metrics(self, **options: Any) -> dict[str, float]:
        """Return samples by name and labels, without the labels that all have.

        A key is, for example, `vllm:request_success_total{finished_reason="stop"}`.
        """
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics", **options).text):
            for sample in family.samples:
                labels = {
                    name: value
                    for name, value in sorted(sample.labels.items())
                    if name not in ("model_name", "engine")
                }
                inner = ",".join(f'{name}="{value}"' for name, value in labels.items())
                samples[sample.name + (f"{{{inner}}}" if inner else "")] = sample.value
        return samples

    def get_process_ids(self) -> list[int]:
        """Return the ids of the parent process and of all its descendants."""
        return [self.process.pid, *get_descendants(self.process.pid)]

    def find_children(self, word: str) -> list[int]:
        """Return the processes with this word in their command line, e.g. "core_main".

        A process that was forked and has not begun its own program has the line of its parent; it
        does not count.
        """
        found = [pid for pid in get_descendants(self.process.pid) if word in get_command(pid)]
        forked = {child for pid in found for child in get_descendants(pid)}
        return [pid for pid in found if pid not in forked]

    def stop(self, timeout_s: float = 60.0) -> int:
        """Stop the server as an operator does, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 240.0) -> int:
        """Wait until the server has ended, and return its exit status."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not stop:\n{self.output}") from None
        self._close()
        return status

    def kill(self) -> None:
        """Kill all processes of the server, whatever state they are in."""
        for pid in reversed(self.get_process_ids()):
            kill(pid)
        self.process.wait(30)
        self._close()

    def _close(self) -> None:
        self._reader.join(60)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()


@contextmanager
def serve(
    model: str, *flags: str, command: str = "serve", is_cold: bool = False, **variables: str
) -> Iterator[ServerProcess]:
    """Run a server for one test. At most one idle shared server stays alive next to it."""
    SHARED_SERVERS.make_room()
    server = ServerProcess(model, *flags, command=command, is_cold=is_cold, **variables)
    try:
        server.wait_until_ready()
        yield server
        server.stop()
    finally:
        if server.process.poll() is None:
            server.kill()


class SharedServers:
    """Servers that stay alive between the test modules that use them.

    Few are alive at once: a new one replaces the idle server that was used longest ago.
    """

    def __init__(self) -> None:
        # model, flags and coldness -> server, the one that was used last at the end
        self._servers: dict[tuple[str, ...], ServerProcess] = {}
        self._num_users: Counter[tuple[str, ...]] = Counter()

    @contextmanager
    def use(self, model: str, *flags: str, is_cold: bool = False) -> Iterator[ServerProcess]:
        """Give a server with these flags. It is started if there is none."""
        key = (model, *flags, str(is_cold))
        server = self._servers.pop(key, None)
        if server is None or server.process.poll() is not None:
            self.make_room()
            server = ServerProcess(model, *flags, is_cold=is_cold)
        self._servers[key] = server
        self._num_users[key] += 1
        try:
            server.wait_until_ready()
            if not server.first_metrics:
                server.note_first_metrics()
            yield server
        finally:
            self._num_users[key] -= 1

    def make_room(self) -> None:
        """Stop idle servers until another one may be started."""
        for key in [key for key in self._servers if not self._num_users[key]]:
            if len(self._servers) < _MOST_ALIVE:
                return
            self._stop(key)

    def stop_all(self) -> None:
        for key in list(self._servers):
            self._stop(key)

    def _stop(self, key: tuple[str, ...]) -> None:
        server = self._servers.pop(key)
        try:
            server.stop()
        finally:
            if server.process.poll() is None:
                server.kill()


SHARED_SERVERS = SharedServers()


def kill(pid: int, signal_number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def get_command(pid: int) -> str:
    """Return the command line of a process, and the name that it has given itself."""
    folder = Path(f"/proc/{pid}")
    try:
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return words + (folder / "comm").read_text().strip()
    except OSError:
        return ""


def get_descendants(pid: int) -> list[int]:
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(word) for word in path.read_text().split()]
        except OSError:
            continue
    return children + [entry for child in children for entry in get_descendants(child)]
