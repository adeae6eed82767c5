"""The work of the workers in `test_pool.py`, without slow imports: a worker starts in 0.2 s."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from sensorium.multimodal.pool.channel import CostlyJobError
from sensorium.types.errors import CapacityError, MediaFetchError, RequestError


class OddError(MediaFetchError):
    """A kind of error that the parent does not know."""


class Servant:
    """A handler of jobs. A job is the name of a `do_` method and its argument."""

    def __init__(self, settings: bytes) -> None:
        self._directory = Path(settings.decode())  # the files in it tell the test what was done
        self._max_cost_s = 0.0

    def __call__(
        self, job: bytes, block: memoryview, *, max_cost_s: float
    ) -> tuple[bytes, dict[str, Any]]:
        word, _, argument = job.decode().partition(" ")
        self._max_cost_s = max_cost_s
        result = getattr(self, f"do_{word}")(argument, block)
        return result if isinstance(result, tuple) else (str(result).encode(), {})

    def close(self) -> None:
        (self._directory / f"closed-{os.getpid()}").touch()

    def do_pid(self, _: str, __: memoryview) -> int:
        return os.getpid()

    def do_double(self, argument: str, _: memoryview) -> int:
        time.sleep(0.005)
        return 2 * int(argument)

    def do_touch(self, argument: str, _: memoryview) -> str:
        (self._directory / argument).touch()
        return argument

    def do_say(self, argument: str, _: memoryview) -> str:
        print(argument, flush=True)
        os.write(2, f"{argument}, too\n".encode())
        return argument

    def do_modules(self, argument: str, _: memoryview) -> bool:
        return argument in sys.modules

    def do_descriptors(self, _: str, __: memoryview) -> int:
        return len(os.listdir("/proc/self/fd"))

    def do_read(self, argument: str, _: memoryview) -> str:
        return os.pread(int(argument), 100, 0).decode()

    def do_sleep(self, argument: str, _: memoryview) -> str:
        (self._directory / f"sleeping-{os.getpid()}").touch()
        time.sleep(float(argument))
        return argument

    def do_sleep_once(self, argument: str, _: memoryview) -> str:
        """Sleep for a minute in the first process that gets this job, and not in the next ones."""
        is_first = not list(self._directory.glob("sleeping-*"))
        (self._directory / f"sleeping-{os.getpid()}").touch()
        if is_first:
            time.sleep(60.0)
        return argument

    def do_wait_for(self, argument: str, _: memoryview) -> str:
        """Wait until the test makes a file of that name, but for a minute at most."""
        (self._directory / f"sleeping-{os.getpid()}").touch()
        ends_at = time.monotonic() + 60.0
        while not (self._directory / argument).exists() and time.monotonic() < ends_at:
            time.sleep(0.005)
        return argument

    def do_be_long(self, argument: str, block: memoryview) -> str:
        """Estimate a minute of work, and if that is allowed, wait until the test makes a file."""
        if self._max_cost_s < 60.0:
            (self._directory / f"costly-{argument}").touch()
            raise CostlyJobError(60.0)
        (self._directory / f"long-{argument}").touch()
        return self.do_wait_for("release", block)

    def do_eat(self, _: str, __: memoryview) -> None:
        raise MemoryError

    def do_abort(self, _: str, __: memoryview) -> None:
        os.abort()

    def do_abort_once(self, argument: str, _: memoryview) -> str:
        if not (self._directory / argument).exists():
            (self._directory / argument).touch()
            os.abort()
        return argument

    def do_refuse(self, argument: str, _: memoryview) -> None:
        kinds = {"request": RequestError, "capacity": CapacityError, "odd": OddError}
        raise kinds[argument]("a reason for the caller")

    def do_bug(self, _: str, __: memoryview) -> None:
        raise KeyError("/secret/path")

    def do_long_reply(self, argument: str, _: memoryview) -> tuple[bytes, dict[str, Any]]:
        return bytes(int(argument)), {}

    def do_echo(self, _: str, block: memoryview) -> tuple[bytes, dict[str, Any]]:
        return bytes(block), {}

    def do_checksum(self, _: str, block: memoryview) -> int:
        from zlib import crc32

        block[:1] = block[:1]  # checks that the block is writable
        return crc32(block)

    def do_tensors(self, argument: str, _: memoryview) -> tuple[bytes, dict[str, Any]]:
        from tests.integration.pool_tensors import make_tensors

        return b"tensors", make_tensors(int(argument))

    def do_num_threads(self, _: str, __: memoryview) -> int:
        import torch

        return torch.get_num_threads()

    def do_decode(self, header: str, block: memoryview) -> tuple[bytes, dict[str, Any]]:
        """Return the tensors of the input as they are."""
        from sensorium.multimodal.item_codec import decode_block

        return b"", dict(decode_block(bytes.fromhex(header), block))


def make_servant(settings: bytes) -> Servant:
    return Servant(settings)


def make_servant_unless_broken(settings: bytes) -> Servant:
    if (Path(settings.decode()) / "broken").exists():
        raise RequestError("it is broken")
    return Servant(settings)


def make_servant_when_allowed(settings: bytes) -> Servant:
    while not (Path(settings.decode()) / "allowed").exists():
        time.sleep(0.01)
    return Servant(settings)


def make_nothing(settings: bytes) -> Servant:
    with (Path(settings.decode()) / "starts").open("a") as file:
        file.write("x")
    raise ValueError("no such model")


def make_nothing_but_a_crash(_: bytes) -> Servant:
    os.abort()
