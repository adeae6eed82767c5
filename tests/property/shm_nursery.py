"""Child processes of the shared-memory tests, as the test sees them: ask, kill, see them die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
ANSWER_TIMEOUT_S = 120.0  # far beyond what a busy machine needs; without an answer: a deadlock


class ChildDiedError(Exception):
    pass


class ChildProcess:
    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection
        self._lines = connection.makefile("rw")

    def ask(self, do: str, *arguments: object, num_stores: int | None = None) -> Any:
        self.send(do, *arguments, num_stores=num_stores)
        return self.receive()

    def send(self, do: str, *arguments: object, num_stores: int | None = None) -> None:
        self._lines.write(
            json.dumps({"do": do, "arguments": arguments, "num_stores": num_stores}) + "\n"
        )
        self._lines.flush()

    def receive(self) -> Any:
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            line = ""
        if not line:
            self._close()
            raise ChildDiedError
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def kill(self) -> None:
        """Returns when it is gone: its end of the connection is closed with its other files."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        try:
            while self._lines.readline():
                pass
        except ConnectionResetError:
            pass
        self._close()

    def leave(self) -> None:
        """It closes its store and ends."""
        self._connection.shutdown(socket.SHUT_WR)
        self.wait()

    def _close(self) -> None:
        self._lines.close()
        self._connection.close()
        end = time.monotonic() + ANSWER_TIMEOUT_S
        while os.path.exists(f"/proc/{self.pid}"):
            assert time.monotonic() < end, f"process {self.pid} doesn't end"
            time.sleep(0.0005)


class Nursery:
    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(120)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.property.shm_child", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def start(self, fd: int) -> ChildProcess:
        """A child that attaches to the store behind `fd`."""
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_TIMEOUT_S)
        socket.send_fds(self._control, [b"."], [theirs.fileno(), fd])
        theirs.close()
        return ChildProcess(int(self._control.recv(16)), ours)

    def close(self) -> None:
        self._control.close()
        assert self._process.wait(timeout=120) == 0


def find_holders(inode: int) -> list[int]:
    """The processes that have an anonymous file open or mapped."""
    folders = Path("/proc").glob("[0-9]*")
    return [int(folder.name) for folder in folders if inode in _get_memfds(folder)]


def _get_memfds(folder: Path) -> set[int]:
    inodes = set()
    # What is listed may be gone, or another user's.
    with suppress(OSError):
        for line in (folder / "maps").read_text().splitlines():
            if "memfd:" in line:
                inodes.add(int(line.split()[4]))
        for path in (folder / "fd").iterdir():
            with suppress(OSError):
                if path.readlink().name.startswith("memfd:"):
                    inodes.add(path.stat().st_ino)
    return inodes
