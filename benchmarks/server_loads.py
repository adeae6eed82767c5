"""The loads that a server is measured with, and the bodies of their requests.

A body follows from its load, a seed, the round and its index, so processes that agree on these make
the same bytes, and two servers can be sent the same. Pictures and clips are new in each round.
"""

from __future__ import annotations

import base64
import io
import json
import wave
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

CHATS, TRANSCRIPTIONS = "/v1/chat/completions", "/v1/audio/transcriptions"
CHECK_ROUND, WARM_ROUND = -2, -1  # before the rounds that count, which begin with 0
_BOUNDARY = "boundary-of-a-clip"
_RATE = 16_000
_WAVE_HEADER = 44  # bytes in front of the samples
_NUM_CLIPS = 64  # others differ from one of these in their first samples only
# Photographs as people send them: width and height before up to 40 pixels are added or taken away.
_SHAPES = (
    *((640, 480), (480, 640), (1024, 768), (800, 600), (1280, 720), (1920, 1080)),
    *((500, 375), (375, 500), (612, 612), (1080, 1350), (1600, 1200), (333, 500)),
)
_GREEDY = {"temperature": 0}
_NUCLEUS = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
_PENALTY = {"temperature": 0.7, "repetition_penalty": 1.05}


@dataclass(frozen=True, kw_only=True)
class Load:
    """A closed loop of requests; each of the clients sends its next one when one is answered."""

    what: str  # in the words of a table's row
    num_requests: int
    num_at_once: int
    max_tokens: int
    media: Literal["png", "jpeg", "clip"] | None = None
    num_media: int | None = None  # how many different ones there are; None: one for each request
    are_known: bool = False  # the media are sent before the clock runs
    has_text_before: bool = False  # text that differs from request to request, before the media
    repeats: str | None = None  # the load from which media are sent again
    sampling: dict[str, Any] = field(default_factory=lambda: _GREEDY)
    is_seeded: bool = False  # each request has its own seed
    side: int = 1024  # pixels of a PNG's side; the sizes of JPEGs are scaled with it
    clip_s: float = 30.0
    headline: str = "requests_per_s"  # the figure by which two servers are compared first

    @property
    def path(self) -> str:
        return TRANSCRIPTIONS if self.media == "clip" else CHATS


def _clips(what: str, *, num_requests: int = 768, at_once: int = 192, repeats: str = "") -> Load:
    return Load(
        what=what,
        num_requests=num_requests,
        num_at_once=at_once,
        max_tokens=0,
        media="clip",
        headline="requests_per_s" if at_once > 1 else "latency_p50_ms",
        repeats=repeats or None,
    )


LOADS = {
    "fresh": Load(
        what="new PNGs of 1024², 32 at a time, 64 tokens out",
        num_requests=128,
        num_at_once=32,
        max_tokens=64,
        media="png",
    ),
    "jpegs": Load(
        what="new JPEGs of mixed sizes, 32 at a time, 64 tokens out",
        num_requests=128,
        num_at_once=32,
        max_tokens=64,
        media="jpeg",
    ),
    "seen": Load(
        what="4 known PNGs of 1024², 32 at a time, 64 tokens out",
        num_requests=256,
        num_at_once=32,
        max_tokens=64,
        media="png",
        num_media=4,
        are_known=True,
    ),
    "chat": Load(
        what="text, 64 at a time, 256 tokens out",
        num_requests=128,
        num_at_once=64,
        max_tokens=256,
        headline="tokens_per_s",
    ),
    "crowd": Load(
        what="text, 256 at a time, 256 tokens out",
        num_requests=512,
        num_at_once=256,
        max_tokens=256,
        headline="tokens_per_s",
    ),
    "stream": Load(
        what="text, one at a time, 256 tokens out",
        num_requests=2,
        num_at_once=1,
        max_tokens=256,
        headline="tokens_per_s",
    ),
    "sampled": Load(
        what="text with temperature, top-p and top-k, 128 at a time, 128 tokens out",
        num_requests=256,
        num_at_once=128,
        max_tokens=128,
        headline="tokens_per_s",
        sampling=_NUCLEUS,
        is_seeded=True,
    ),
    "penalty": Load(
        what="text with a repetition penalty, 128 at a time, 128 tokens out",
        num_requests=256,
        num_at_once=128,
        max_tokens=128,
        headline="tokens_per_s",
        sampling=_PENALTY,
        is_seeded=True,
    ),
    "ingest": Load(
        what="text, 256 at a time, one token out", num_requests=1024, num_at_once=256, max_tokens=1
    ),
    "transcripts": _clips("transcripts of new clips of 30 s, 192 at a time"),
    "transcripts_again": _clips(
        "transcripts of the same clips again, 192 at a time", repeats="transcripts"
    ),
    "transcripts_single": _clips(
        "transcripts of new clips of 30 s, one at a time", num_requests=16, at_once=1
    ),
}


def _probe(what: str, **options: Any) -> Load:
    return Load(
        what=what, num_requests=7, num_at_once=1, max_tokens=8, headline="ttft_p50_ms", **options
    )


# Times to the first token, one request after another. They are measured together, so that each
# picture is sent for the first time, then again, and then behind another text.
PROBES = {
    "probe_text": _probe("first token, text"),
    "probe_new": _probe("first token, a new PNG of 1024²", media="png"),
    "probe_same": _probe(
        "first token, the same PNG and prompt again", media="png", repeats="probe_new"
    ),
    "probe_new_text": _probe(
        "first token, the same PNG behind another text",
        media="png",
        repeats="probe_new",
        has_text_before=True,
    ),
}
SPEECH = tuple(name for name, load in LOADS.items() if load.media == "clip")
CHAT_LOADS = ("probe", *(name for name in LOADS if name not in SPEECH))


def shrink(load: Load) -> Load:
    """Return a load that a processor without a GPU carries in a second or two."""
    return replace(
        load,
        num_requests=min(4, load.num_requests),
        num_at_once=min(2, load.num_at_once),
        max_tokens=min(4, load.max_tokens),
        num_media=load.num_media and 2,
        side=128,
        clip_s=2.0,
    )


def num_kinds(load: Load) -> int:
    """Return how many requests have all the sizes of a load between them."""
    return min(load.num_requests, len(_SHAPES)) if load.media == "jpeg" else 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The requests of a load in one round."""

    name: str
    load: Load
    seed: int
    round: int
    model: str

    def make_body(self, index: int) -> bytes:
        load = self.load
        number = index % load.num_media if load.num_media else index
        if load.media == "clip":
            return _make_form(self.model, make_clip(self._get_key(number), number, load.clip_s))
        parts: list[dict[str, Any]] = []
        if load.has_text_before:
            parts.append({"type": "text", "text": f"Case {index} of {self.seed}.{self.round}: "})
        if load.media is not None:
            parts.append(self._make_picture_part(number))
            text = f"Question {index}: describe it."
        else:
            text = f"Question {index} of {self.name} {self.seed}.{self.round}: describe it."
        return self._make_chat([*parts, {"type": "text", "text": text}], index)

    def make_first_bodies(self) -> list[bytes]:
        """Return one request for each known picture, to be sent before the clock runs."""
        text = {"type": "text", "text": "Look."}
        return [
            self._make_chat([self._make_picture_part(number), text], 0)
            for number in range(self.load.num_media or 0)
        ]

    def _make_chat(self, parts: list[dict[str, Any]], index: int) -> bytes:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": self.load.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.load.sampling,
            **({"seed": index} if self.load.is_seeded else {}),
        }
        return json.dumps(body).encode()

    def _make_picture_part(self, number: int) -> dict[str, Any]:
        make = _make_png if self.load.media == "png" else _make_jpeg
        url = make(self._get_key(number), number, self.load.side)
        return {"type": "image_url", "image_url": {"url": url}}

    def _get_key(self, number: int) -> tuple[int, ...]:
        """Return the seed of a picture or clip, which a load that repeats another one shares."""
        name = self.load.repeats or self.name
        return (*name.encode(), self.seed, self.round - CHECK_ROUND, number)


# ---- pictures and clips


def make_picture(draw: np.random.Generator, width: int, height: int) -> npt.NDArray[np.uint8]:
    """Return waves with a little noise, so that their PNG is as large as that of a photograph."""
    across = np.linspace(0, 2 * np.pi, width, dtype=np.float32)
    down = np.linspace(0, 2 * np.pi, height, dtype=np.float32)
    pixels = np.zeros((height, width, 3), np.float32)
    for channel in range(3):
        for _ in range(6):
            x = across * np.float32(draw.uniform(0.5, 12))
            y = down * np.float32(draw.uniform(0.5, 12)) + np.float32(draw.uniform(0, 6))
            # The sine of a sum as two outer products: sines are computed along the edges only.
            pixels[..., channel] += np.outer(np.sin(y), np.cos(x)) + np.outer(np.cos(y), np.sin(x))
    pixels = (pixels - pixels.min()) / np.ptp(pixels) * 240
    pixels += draw.standard_normal(pixels.shape, np.float32) * 3
    clipped: npt.NDArray[np.uint8] = pixels.clip(0, 255).astype(np.uint8)
    return clipped


# Requests with the same picture follow one another.
@lru_cache(maxsize=4)
def _make_png(key: tuple[int, ...], _: int, side: int) -> str:
    pixels = make_picture(np.random.default_rng(key), side, side)
    return _to_url(pixels, "png", compress_level=1)


@lru_cache(maxsize=4)
def _make_jpeg(key: tuple[int, ...], number: int, side: int) -> str:
    draw, scale = np.random.default_rng(key), side / 1024
    width, height = (int((edge + draw.integers(-40, 40)) * scale) for edge in _get_edges(number))
    return _to_url(make_picture(draw, width, height), "jpeg", quality=90)


def _get_edges(number: int) -> tuple[int, int]:
    return _SHAPES[number % len(_SHAPES)]


def _to_url(pixels: npt.NDArray[np.uint8], kind: str, **options: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def make_clip(key: tuple[int, ...], number: int, seconds: float) -> bytes:
    """Return a WAV file with noise, and with tones that come and go as syllables do.

    There are only so many sets of tones, because each takes long to make. The first samples are
    drawn for each clip, at a very low volume, so that no two files are alike.
    """
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(_RATE)
        writer.writeframes(_make_tones(number % _NUM_CLIPS, seconds).tobytes())
    marked = bytearray(file.getvalue())
    mark = np.random.default_rng(key).integers(-127, 127, 16).astype("<i2").tobytes()
    marked[_WAVE_HEADER : _WAVE_HEADER + len(mark)] = mark
    return bytes(marked)


@lru_cache(maxsize=_NUM_CLIPS)
def _make_tones(number: int, seconds: float) -> npt.NDArray[np.int16]:
    draw = np.random.default_rng(number)
    time = np.arange(int(seconds * _RATE), dtype=np.float32) / _RATE
    audio = draw.standard_normal(len(time), np.float32) * np.float32(0.02)
    for _ in range(5):
        pitch, sway, depth = draw.uniform(100, 3000), draw.uniform(0.2, 2), draw.uniform(5, 60)
        tone = np.sin(2 * np.pi * (pitch * time + depth * np.sin(2 * np.pi * sway * time)))
        beat = np.sin(2 * np.pi * draw.uniform(1, 4) * time + draw.uniform(0, 6))
        audio += np.float32(draw.uniform(0.03, 0.12)) * beat.clip(0, None) * tone
    return (audio.clip(-1, 1) * 32767).astype("<i2")


def _make_form(model: str, clip: bytes) -> bytes:
    fields = {"model": model, "language": "en", "response_format": "json", "temperature": "0"}
    parts = [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    parts.append(
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="clip.wav"\r\n'
        "Content-Type: audio/wav\r\n\r\n"
    )
    return "".join(parts).encode() + clip + f"\r\n--{_BOUNDARY}--\r\n".encode()


def get_content_type(path: str) -> str:
    is_form = path == TRANSCRIPTIONS
    return f"multipart/form-data; boundary={_BOUNDARY}" if is_form else "application/json"
