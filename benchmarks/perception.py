"""Measures what an item costs: again, for the first time, and on its way to the core.

hit: from an OpenAI message with a 1.9 MB PNG as a data URL, which the cache has, to features ready;
against decoding the base64 (pybase64) and digesting (sha256) those bytes alone. The PNG has
796 × 796 pixels of noise, which the processor makes 784 × 784: 784 tokens.
cold: PNGs of 1024 × 1024 per second, never seen before, with 2 processes against 1. The processor
makes them 980 × 980: 1,225 tokens.
transfer: an item of 10 MB from a process of the pool to the core's hands, from asking the pool (for
a result that it has ready) to having the tensors; against copying 10 MB, and sending them over ZMQ
to another process and receiving an answer.

The processor is Qwen2.5-VL's, limited to 1,280 tokens a picture (its own limit is 16,384).
Everything runs in turn, many times, in one run; the figures are medians, in milliseconds.

python benchmarks/perception.py [--rounds N] [--record]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pybase64
import torch
import zmq
from PIL import Image

from records import write_record
from sensorium import SamplingParams
from sensorium.engine.assembly.frontend import (
    Caches,
    MediaParts,
    build_caches,
    build_frontend,
    build_receiver,
    build_store,
    read_checkpoint,
)
from sensorium.engine.assembly.options import LoadingOptions, MediaOptions
from sensorium.engine.inputs.input_processor import InputProcessor
from sensorium.engine.inputs.renderer import Renderer, make_chats
from sensorium.multimodal.cache.interface import ItemHandle, SenderCache
from sensorium.multimodal.cache.shm import ShmSender
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.item_codec import get_num_bytes
from sensorium.multimodal.pool.jobs import PoolReply
from sensorium.multimodal.pool.pool import ProcessPool
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, ProcessedItem, ShmReference
from sensorium.types.sampling import GenerationDefaults

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from make_tiny_models import make_family

ROOT = Path(__file__).parent.parent
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # in pixels: 1,280 tokens
ITEM_BYTES = 10_000_000
HANDLER = "perception:ReadyHandler"
LAYOUT = ItemLayout(text="x", token_id=0, num_embeds=1)
Figures = dict[str, Any]
_seeds = count()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="of everything (default 15)")
    parser.add_argument("--record", action="store_true", help="write records/perception.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {
        "hit": measure_hit(10 * arguments.rounds),
        "cold": measure_cold(arguments.rounds),
        "transfer": measure_transfer(4 * arguments.rounds),
    }
    print(json.dumps(figures, indent=1))
    if arguments.record:
        print(f"written to {write_record('perception', figures)}")
    print(json.dumps(figures))


def take_turns(
    rounds: int, *, in_a_row: int = 1, **steps: Callable[[], object]
) -> dict[str, float]:
    """Return the median milliseconds of each: all of them `in_a_row`, then all of them again."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            for _ in range(in_a_row):
                start = perf_counter()
                step()
                times[name].append(perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def make_png(width: int, height: int, *, noise: int = 256) -> bytes:
    generator = np.random.default_rng(next(_seeds))
    pixels = generator.integers(0, noise, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


@contextmanager
def perceiving(**options: Any) -> Iterator[tuple[InputProcessor, MediaParts]]:
    """Build a frontend without an engine."""
    directory = str(make_family("qwen2_5_vl", ROOT / "build" / "tiny-models"))
    media = MediaOptions(mm_processor_kwargs={"size": SIZE}, **options)
    loading = LoadingOptions(model=directory)
    caches = build_caches(media, build_store(media))
    frontend = build_frontend(loading, read_checkpoint(loading), media, caches)
    media_parts = frontend.media_parts
    inputs = InputProcessor(
        frontend.processor,
        pipeline=media_parts.pipeline,
        defaults=GenerationDefaults(),
        limit_mm_per_prompt={},
        mm_processor_kwargs=media.mm_processor_kwargs,
        seed=0,
    )
    with closing(media_parts):
        yield inputs, media_parts


def measure_hit(rounds: int) -> Figures:
    data = make_png(796, 796)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    encoded = url.partition(",")[2].encode()
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "And this?"},
    ]
    messages = [{"role": "user", "content": parts}]
    num_tokens = 0
    with perceiving() as (inputs, media_parts):
        renderer = Renderer(inputs)

        def hit() -> None:
            nonlocal num_tokens
            (chat,) = make_chats(messages, {})
            processed = renderer.render(chat, SamplingParams()).processed
            num_tokens = len(processed.request.prompt_token_ids)
            media_parts.caches.sender.release([item.handle for item in processed.items])

        def digest() -> None:
            hashlib.sha256(pybase64.b64decode(encoded, validate=True)).digest()

        hit()  # not one yet
        times = take_turns(rounds, hit=hit, base64_and_sha256=digest)
        statistics_ = media_parts.caches.sender.statistics()
        assert statistics_.num_hits == statistics_.num_queries - 1
    return {
        "png_bytes": len(data),
        "prompt_tokens": num_tokens,
        **_rounded(times),
        "ratio": round(times["hit"] / times["base64_and_sha256"], 2),
    }


def measure_cold(rounds: int) -> Figures:
    batch = 8
    with perceiving(mm_processor_pool_size=1) as one, perceiving(mm_processor_pool_size=2) as two:
        for _, media_parts in (one, two):
            assert media_parts.pool is not None
            assert media_parts.pool.wait_until_ready(300)

        def run(inputs: InputProcessor, media_parts: MediaParts, pngs: list[bytes]) -> None:
            def process(png: bytes) -> None:
                prompt: Any = {
                    "prompt": "<|image_pad|>",
                    "multi_modal_data": {"image": png},
                }
                processed = inputs.process("r", prompt, SamplingParams(seed=1))
                media_parts.caches.sender.release([item.handle for item in processed.items])

            with ThreadPoolExecutor(4) as threads:
                list(threads.map(process, pngs))

        def measure(frontend: tuple[InputProcessor, MediaParts]) -> float:
            pngs = [make_png(1024, 1024, noise=16) for _ in range(batch)]
            start = perf_counter()
            run(*frontend, pngs)
            return batch / (perf_counter() - start)

        measure(one), measure(two)
        rates = [(measure(one), measure(two)) for _ in range(rounds)]
    return {
        "png_bytes": len(make_png(1024, 1024, noise=16)),
        "images_per_s_1_process": round(statistics.median(rate for rate, _ in rates), 2),
        "images_per_s_2_processes": round(statistics.median(rate for _, rate in rates), 2),
        "ratio": round(statistics.median(b / a for a, b in rates), 2),
    }


class ReadyHandler:
    """A handler with a ready result of `ITEM_BYTES` that it stores or sends back."""

    def __init__(self, settings: bytes) -> None:
        self._kwargs = _make_tensors()
        self._store = ShmStore.attach(int(settings)) if settings else None

    def __call__(
        self, job: bytes, block: memoryview, *, max_cost_s: float
    ) -> tuple[bytes, MultiModalKwargsItem]:
        del block, max_cost_s
        if not job:
            return b"", {}
        item = ProcessedItem(
            modality="image", mm_hash=job.decode(), kwargs=self._kwargs, layout=LAYOUT
        )
        if self._store is None:
            return b"", item.kwargs
        reference = self._store.put(item)
        assert reference is not None
        self._store.release(reference)
        return f"{reference.slot} {reference.generation}".encode(), {}

    def close(self) -> None:
        pass


def _make_tensors() -> MultiModalKwargsItem:
    return {"pixel_values": torch.rand(ITEM_BYTES // 4)}


class Route:
    """The way of an item from a process of the pool over the caches to the core."""

    def __init__(self, cache_type: str) -> None:
        capacity_gb = 8 * ITEM_BYTES / 2**30  # so that most items come where others have been
        options = MediaOptions(
            mm_processor_cache_type=cache_type, mm_processor_cache_gb=capacity_gb
        )
        store = build_store(options)
        # The core is another process: it has a mapping of its own.
        self._receiver = build_receiver(None if store is None else ShmStore.attach(store.fd))
        self.caches: Caches = build_caches(options, store, self._receiver)
        self._pool = ProcessPool(
            1,
            handler=HANDLER,
            settings=b"" if store is None else str(store.fd).encode(),
            inherited_fds=() if store is None else (store.fd,),
        )
        assert self._pool.wait_until_ready(300)

    def miss(self) -> None:
        mm_hash = hashlib.sha256(str(next(_seeds)).encode()).hexdigest()
        reply: PoolReply = self._pool.submit(mm_hash.encode(), deadline_s=60).result()
        sender: SenderCache = self.caches.sender
        if isinstance(sender, ShmSender):
            slot, generation = map(int, reply.reply.split())
            handle = sender.adopt(mm_hash, ShmReference(slot=slot, generation=generation))
        else:
            item = ProcessedItem(
                modality="image", mm_hash=mm_hash, kwargs=reply.kwargs, layout=LAYOUT
            )
            handle = sender.get_and_update_item(mm_hash, item)
        self.last = mm_hash
        self._deliver(handle)

    def hit(self) -> None:
        self._deliver(self.caches.sender.get_and_update_item(self.last))

    def ask(self) -> None:
        self._pool.submit(b"", deadline_s=60).result()

    def _deliver(self, handle: ItemHandle | None) -> None:
        assert handle is not None
        received = self._receiver.receive(
            (handle.mm_hash,), self.caches.sender.make_transfer([handle])
        )
        assert isinstance(received, dict)
        assert get_num_bytes(received[handle.mm_hash]) >= ITEM_BYTES
        self.caches.sender.release([handle])
        self._receiver.release((handle.mm_hash,))

    def close(self) -> None:
        self._pool.close()


_ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.PAIR)
socket.connect(sys.argv[1])
while True:
    frame = socket.recv(copy=False)
    if not len(frame):
        break
    socket.send(b"")
"""


@contextmanager
def echoing() -> Iterator[zmq.Socket[bytes]]:
    """Open a socket to a process that answers each message with an empty one."""
    with (
        tempfile.TemporaryDirectory() as directory,
        zmq.Context() as context,
        context.socket(zmq.PAIR) as socket,
    ):
        address = f"ipc://{directory}/echo"
        socket.bind(address)
        child = subprocess.Popen([sys.executable, "-c", _ECHO, address])
        try:
            yield socket
        finally:
            socket.send(b"")
            child.wait(30)


def measure_transfer(rounds: int) -> Figures:
    source = np.random.default_rng(0).integers(0, 256, ITEM_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    with echoing() as socket, closing(Route("lru")) as lru, closing(Route("shm")) as shm:

        def send() -> None:
            socket.send(source.data, copy=False)
            socket.recv()

        times = take_turns(
            rounds,
            in_a_row=4,
            memcpy=lambda: np.copyto(target, source),
            zmq=send,
            pool_round_trip=shm.ask,
            lru_miss=lru.miss,
            lru_hit=lru.hit,
            shm_miss=shm.miss,
            shm_hit=shm.hit,
        )
    ratios = {f"{name}_per_memcpy": round(t / times["memcpy"], 2) for name, t in times.items()}
    return {"item_bytes": ITEM_BYTES, **_rounded(times), **ratios}


def _rounded(times: dict[str, float]) -> dict[str, float]:
    return {f"{name}_ms": round(value, 4) for name, value in times.items()}


if __name__ == "__main__":
    main()
