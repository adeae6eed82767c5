"""Runs a supervisor with stand-in children in another process, and observes it from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until

HANG_S = 60.0  # longer than anything takes unless it hangs
_PARENT = str(Path(__file__).parent / "stand_in_parent.py")
Event = dict[str, Any]


class Supervised:
    """A supervisor in another process, with the events that its children have written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "t"  # the server makes its private directory in it
        self.temporary.mkdir()
        self._parent: subprocess.Popen[str] | None = None

    def behave(self, kind: str, *lines: str) -> None:
        (self.folder / kind).write_text("".join(f"{line}\n" for line in lines))

    def start(self, *, grace_s: float = HANG_S, **options: Any) -> None:
        """Start the supervisor. Its time limits are long, so that no slow process is killed."""
        loading = {"model": "a-model"}
        given = {"loading": loading, "port": 0, "shutdown_timeout": HANG_S, **options}
        with (self.folder / "stderr").open("w") as stderr:
            self._parent = subprocess.Popen(
                [sys.executable, _PARENT, str(self.folder), json.dumps(given), str(grace_s)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | {"TMPDIR": str(self.temporary)},
            )

    @property
    def parent(self) -> subprocess.Popen[str]:
        assert self._parent is not None
        return self._parent

    def read_until_ready(self) -> list[str]:
        """Return the lines on stdout up to the one with "is ready"."""
        lines: list[str] = []
        assert self.parent.stdout is not None
        for line in self.parent.stdout:
            lines.append(line.rstrip())
            if "is ready" in line:
                return lines
        raise AssertionError(f"it ended before it was ready: {self.get_stderr()}")

    def end(self) -> int:
        """Wait until the supervisor ends, and return its exit status."""
        return self.parent.wait(HANG_S)

    def get_stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def get_events(self, who: str = "", event: str = "") -> list[Event]:
        path = self.folder / "events"
        text = path.read_text() if path.exists() else ""
        events = [json.loads(line) for line in text.splitlines()]
        return [e for e in events if e["who"].startswith(who) and e["event"].startswith(event)]

    def wait_for_event(self, who: str, event: str) -> Event:
        wait_until(lambda: bool(self.get_events(who, event)))
        return self.get_events(who, event)[0]

    def get_child_ids(self) -> set[int]:
        return {event["pid"] for event in self.get_events(event="Start")}

    def check_nothing_is_left(self) -> None:
        """Wait until none of all its children is alive, and no file is left."""
        wait_until(lambda: not any(map(is_alive, self.get_child_ids())))
        wait_until(lambda: not list(self.temporary.iterdir()))

    def clean_up(self) -> None:
        if self._parent is None:
            return
        if self._parent.poll() is None:
            self._parent.kill()
        self._parent.communicate()
        for process_id in self.get_child_ids():
            if is_alive(process_id):
                os.kill(process_id, signal.SIGKILL)


def is_alive(process_id: int) -> bool:
    """Return whether a process exists. A zombie does: its parent has not collected its status."""
    return Path(f"/proc/{process_id}").exists()
