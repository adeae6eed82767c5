"""A process that uses a shared-memory store on command, and can be ordered to kill itself in it.

Started as a module it is a nursery: it imports once, and forks a child for every connection it is
handed. Commands and answers are lines of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sensorium.multimodal.cache import shm_memory
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, ProcessedItem, ShmReference

# So that the memory grows in several steps, and a process may end in any of them.
shm_memory.EXTENT_BYTES = 8 * 1024


def make_item(name: str, *, has_layout: bool) -> ProcessedItem:
    """Make an item from its name, so that any process can check its bytes."""
    mm_hash = hashlib.sha256(name.encode()).hexdigest()
    size = int(name.split("-")[1])
    content = hashlib.shake_256(name.encode()).digest(size)
    return ProcessedItem(
        modality="image",
        mm_hash=mm_hash,
        kwargs={
            "pixel_values": torch.frombuffer(bytearray(content), dtype=torch.uint8),
            "grid": torch.tensor([size, size + 1]),
        },
        layout=ItemLayout(text=name, token_id=size, num_embeds=1) if has_layout else None,
    )


def is_right(name: str, kwargs: MultiModalKwargsItem) -> bool:
    expected = make_item(name, has_layout=False).kwargs
    return expected.keys() == kwargs.keys() and all(
        torch.equal(expected[key], kwargs[key]) for key in expected
    )


def sweep(store: ShmStore) -> None:
    """Take back what dead processes held, as `put` does when it needs room."""
    with store._segment:
        store._sweep()


class Fuse:
    """Ends this process before its n-th store into shared memory, once it is set."""

    def __init__(self) -> None:
        self.num_stores: int | None = None

    def step(self) -> None:
        if self.num_stores is not None:
            self.num_stores -= 1
            if self.num_stores < 0:
                os.kill(os.getpid(), signal.SIGKILL)


class FusedArray(np.ndarray):
    """An array in shared memory that burns the fuse with each stored word."""

    fuse: Fuse | None = None

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.fuse is None:
            super().__setitem__(index, value)
            return
        target = self.view(np.ndarray)
        places = np.arange(target.size).reshape(target.shape)[index]
        flat = target.reshape(-1)
        for place, word in zip(places.flat, np.broadcast_to(value, places.shape).flat, strict=True):
            self.fuse.step()
            flat[place] = word


def lay_fuse(store: ShmStore) -> Fuse:
    fuse = Fuse()
    index = store._index
    for name, value in vars(index).items():
        if isinstance(value, np.ndarray):
            fused = value.view(FusedArray)
            fused.fuse = fuse
            setattr(index, name, fused)
    write = store._write

    def write_in_steps(slot: int, item: ProcessedItem, metadata: bytes) -> None:
        offset, *_ = index.get_extent(slot)
        fuse.step()
        store._data[offset : offset + 64] = bytes(64)
        fuse.step()
        write(slot, item, metadata)
        fuse.step()

    store._write = write_in_steps  # type: ignore[method-assign]
    return fuse


class Child:
    def __init__(self, store: ShmStore) -> None:
        self.store = store
        self.fuse = lay_fuse(store)

    def hello(self) -> int:
        return self.store._member

    def put(self, name: str, has_layout: bool) -> list[int] | None:
        return _pack(self.store.put(make_item(name, has_layout=has_layout)))

    def acquire(self, name: str, is_use: bool) -> list[int] | None:
        entry = self.store.acquire(make_item(name, has_layout=False).mm_hash, is_use=is_use)
        return None if entry is None else _pack(entry.reference)

    def lease(self, slot: int, generation: int) -> str | None:
        entry = self.store.lease(ShmReference(slot=slot, generation=generation))
        return None if entry is None else entry.mm_hash

    def check(self, slot: int, generation: int, name: str) -> bool:
        return is_right(name, self.store.open(ShmReference(slot=slot, generation=generation)))

    def release(self, slot: int, generation: int) -> None:
        self.store.release(ShmReference(slot=slot, generation=generation))

    def clear(self) -> None:
        self.store.clear_cache()

    def sweep(self) -> None:
        sweep(self.store)

    def stress(self, names: list[str], seed: int, seconds: float) -> int:
        """Put and read at random, at least eleven times. Return the number of reads or an error."""
        choose = random.Random(seed)
        num_reads = 0
        held: list[tuple[str, ShmReference]] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end or num_reads <= 10:
            name = choose.choice(names)
            item = make_item(name, has_layout=choose.random() < 0.5)
            action = choose.random()
            if action < 0.5:
                reference = self.store.put(item)
            elif action < 0.98:
                entry = self.store.acquire(item.mm_hash)
                reference = None if entry is None else entry.reference
            else:
                self.store.clear_cache()
                reference = None
            if reference is not None:
                held.append((name, reference))
            if len(held) > 2 or (held and reference is None):
                name, reference = held.pop(choose.randrange(len(held)))
                if not is_right(name, self.store.open(reference)):
                    raise ValueError(f"wrong bytes of {name} in {reference}")
                num_reads += 1
                self.store.release(reference)
        for _, reference in held:
            self.store.release(reference)
        return num_reads


def _pack(reference: ShmReference | None) -> list[int] | None:
    return None if reference is None else [reference.slot, reference.generation]


def serve(connection: socket.socket, fd: int) -> None:
    child = Child(ShmStore.attach(fd))
    os.close(fd)
    with connection.makefile("rw") as lines:
        for line in lines:
            command = json.loads(line)
            child.fuse.num_stores = command["num_stores"]
            act: Callable[..., object] = getattr(child, command["do"])
            try:
                answer = {"answer": act(*command["arguments"])}
            except Exception as error:
                answer = {"error": repr(error)}
            child.fuse.num_stores = None
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    child.store.close()


def main() -> None:
    """Hands out children until the other end of the control socket is gone."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # dead children are not waited for
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not fds:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            serve(socket.socket(fileno=fds[0]), fds[1])
            os._exit(0)
        for fd in fds:
            os.close(fd)
        control.sendall(f"{pid:16d}".encode())


if __name__ == "__main__":
    main()
