"""Runs a real Redis for a test, which may be killed, stopped for a while and started again."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.waiting import wait_until

_COMMAND = "redis-server"


class RedisServer:
    """A Redis that listens at a socket in a folder of its own, and keeps nothing on disk."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._folder = folder
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = folder / "redis.sock"  # the path of a socket may have 107 bytes at most
        self.url = f"unix://{self.socket}"

    def make_client(self) -> redis.Redis:
        """Return a client that does not repeat what failed."""
        return redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0))

    def start(self) -> None:
        command = [_COMMAND, "--port", "0", "--unixsocket", str(self.socket)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(self._is_ready, "Redis answers")

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            with self.make_client() as client:
                client.ping()
        except redis.AuthenticationError:
            return True  # it has a password
        except redis.ConnectionError:
            return False
        return True

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self.socket.unlink(missing_ok=True)

    def hang(self) -> None:
        """Stop its process, so that connections are accepted and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def get_keys(self) -> list[str]:
        with self.make_client() as client:
            return sorted(key.decode() for key in client.scan_iter())


@contextmanager
def run_redis(*flags: str) -> Iterator[RedisServer]:
    """Run a Redis with further flags, or skip the test where there is none on the machine."""
    if shutil.which(_COMMAND) is None:
        pytest.skip("no redis-server on this machine")
    with tempfile.TemporaryDirectory(prefix="redis-", dir="/tmp") as folder:
        server = RedisServer(Path(folder), *flags)
        try:
            server.start()
            yield server
        finally:
            server.kill()
