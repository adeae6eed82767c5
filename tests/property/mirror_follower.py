"""A real process with the follower of the mirrored cache in it, and a quick way to get a new one.

`python -m tests.property.mirror_follower FD` imports torch once and then forks a follower for each
socket that it is handed over the socket FD. A follower ends when its peer closes the socket.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec

from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.multimodal.item_codec import decode_block, encode_header, get_num_bytes, write_block
from sensorium.types.multimodal import MirrorUpdate, MissingItems, MultiModalKwargsItem, Transfer
from tests.unit.multimodal.cache.item_building import get_kept_sizes

START_TIMEOUT_S = 120.0  # torch is imported, perhaps on a busy machine
TIMEOUT_S = 120.0
READY = b"r"

EncodedItems = dict[str, tuple[bytes, bytes]]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Without `update`: clear the cache. `is_refused`: the core will not admit the request."""

    mm_hashes: tuple[str, ...] = ()
    update: MirrorUpdate | None = None
    payloads: EncodedItems = {}
    is_refused: bool = False


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The follower's answer, with the bytes that it holds now for each hash."""

    items: EncodedItems | None
    missing: MissingItems | None
    kept: dict[str, int]  # mm_hash -> bytes that the follower holds
    epoch: int


def encode_items(items: dict[str, MultiModalKwargsItem]) -> EncodedItems:
    encoded = {}
    for mm_hash, kwargs in items.items():
        block = bytearray(get_num_bytes(kwargs))
        write_block(kwargs, memoryview(block))
        encoded[mm_hash] = (encode_header(kwargs), bytes(block))
    return encoded


def decode_items(items: EncodedItems) -> dict[str, MultiModalKwargsItem]:
    return {
        mm_hash: decode_block(header, memoryview(bytearray(block)))
        for mm_hash, (header, block) in items.items()
    }


def write_frame(stream: socket.socket, frame: bytes) -> None:
    stream.sendall(len(frame).to_bytes(4, "little") + frame)


def read_frame(stream: socket.socket) -> bytes | None:
    """Return the next frame, or `None` at the end of the stream."""
    size = _read(stream, 4)
    return None if size is None else _read(stream, int.from_bytes(size, "little"))


def _read(stream: socket.socket, num_bytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = stream.recv(num_bytes - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


class Follower:
    """The test's end of a follower process."""

    def __init__(self, stream: socket.socket, pid: int) -> None:
        self._stream = stream
        self._pid = pid

    def send(self, message: Message) -> None:
        write_frame(self._stream, msgspec.msgpack.encode(message))

    def read_reply(self) -> Reply:
        frame = read_frame(self._stream)
        assert frame is not None, "the follower has died"
        return msgspec.msgpack.decode(frame, type=Reply)

    def kill(self) -> None:
        """Kill the real process. Its unread answers are lost."""
        os.kill(self._pid, signal.SIGKILL)
        try:
            while self._stream.recv(65536):
                pass
        except ConnectionResetError:
            pass
        self._stream.close()

    def close(self) -> None:
        self._stream.close()


class Nursery:
    """The process that followers are forked from."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_TIMEOUT_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parent.parent.parent,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        assert self._control.recv(1) == READY, "the process for followers could not be started"
        self._control.settimeout(TIMEOUT_S)

    def start_follower(self) -> Follower:
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_S)
        with theirs:
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])
        pid = int.from_bytes(self._control.recv(8), "little")
        assert pid, "no follower could be started"
        return Follower(ours, pid)

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


def serve(stream: socket.socket) -> None:
    receiver = MirrorReceiver()
    while (frame := read_frame(stream)) is not None:
        message = msgspec.msgpack.decode(frame, type=Message)
        write_frame(stream, msgspec.msgpack.encode(_answer(receiver, message)))


def _answer(receiver: MirrorReceiver, message: Message) -> Reply:
    received: dict[str, MultiModalKwargsItem] | MissingItems = {}
    if message.update is None:
        receiver.clear_cache()
    else:
        payloads = decode_items(message.payloads)
        transfer = Transfer(payloads=payloads, update=message.update)
        received = receiver.receive(message.mm_hashes, transfer)
    is_missing = isinstance(received, MissingItems)
    statistics = receiver.statistics()
    kept = get_kept_sizes(receiver)
    assert (statistics.num_items, statistics.num_bytes) == (len(kept), sum(kept.values()))
    return Reply(
        items=None if is_missing or message.is_refused else encode_items(received),
        missing=received if is_missing else None,
        kept=kept,
        epoch=receiver.epoch,
    )


def run_follower(control: socket.socket, descriptor: int) -> NoReturn:
    """Obey commands, and end the process without the interpreter's shutdown.

    A shutdown would copy all memory that is shared with the parent, and takes longer than the rest.
    """
    try:
        control.close()
        serve(socket.socket(fileno=descriptor))
    except ConnectionError:
        pass  # the peer left while an answer was being written
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.sendall(READY)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the leader does not wait for the followers
    gc.freeze()  # memory without writes stays shared with them
    while True:
        word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return
        pid = os.fork()
        if not pid:
            run_follower(control, descriptors[0])
        os.close(descriptors[0])
        control.sendall(pid.to_bytes(8, "little"))


if __name__ == "__main__":
    main()
