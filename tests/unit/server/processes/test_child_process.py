"""The parent's hold on a child that ends while it is spoken to."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

import pytest

from sensorium.server.processes.control import (
    ChildProcess,
    Failed,
    FrontendGone,
    Serving,
    Stop,
    encode_line,
)

# It receives something, sends its last messages, and ends.
_CHILD = """
import os, sys
last_words, num_bytes, descriptor = sys.argv[1], *map(int, sys.argv[2:])
os.read(descriptor, num_bytes)
os.write(descriptor, last_words.encode())
os._exit(3)
"""


@pytest.mark.parametrize("num_bytes", [1, 1000], ids=["half received", "all received"])
def test_the_last_messages_of_a_child_are_read_after_a_failed_write(num_bytes: int) -> None:
    last_words = [Serving(()), Failed("why")]

    async def main() -> None:
        words = b"".join(map(encode_line, last_words)).decode()
        command = (sys.executable, "-S", "-c", _CHILD, words, str(num_bytes))
        child = await ChildProcess.spawn("core", command, inherited_fds=(), environment=os.environ)
        child.send(FrontendGone("f0-1"))
        with suppress(ChildProcessError):  # the one who waits for its status was faster
            os.waitid(os.P_PID, child._process.pid, os.WEXITED | os.WNOWAIT)
        child.send(Stop())  # the loop has had no turn: nothing was read yet
        assert [await child.receive() for _ in range(3)] == [*last_words, None]
        assert await child.wait_until_ended() == "status 3"

    asyncio.run(asyncio.wait_for(main(), 240))
