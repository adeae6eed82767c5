"""What the clients of a soak ask: good requests of all kinds, and bad ones with what they get."""

from __future__ import annotations

import base64
import io
import json
import random
import wave
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_WORDS = ("fox", "dog", "house", "river", "jumps", "over", "blue", "seven", "quiet", "stone")
_NUM_REPEATED = 8
_SIDE = 112
_RATE = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRequest:
    """A request of the soak test, with the status that is expected."""

    kind: str
    path: str
    content: bytes
    # Requests with the same key must get the same tokens; None: their tokens are not compared.
    key: str | None = None
    status: int = 200  # what is expected
    is_streamed: bool = False
    num_completions: int = 1


def make_image(seed: int, *, side: int = _SIDE) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((side, side)).save(file, "PNG")
    return file.getvalue()


def make_audio(seed: int) -> bytes:
    file = io.BytesIO()
    samples = np.random.default_rng(seed).integers(-9000, 9000, _RATE // 2, dtype=np.int16)
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(_RATE)
        audio.writeframes(samples.tobytes())
    return file.getvalue()


def make_video(seed: int) -> bytes:
    file = io.BytesIO()
    greys = np.random.default_rng(seed).integers(0, 256, 4)
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width = stream.height = 64
        stream.pix_fmt, stream.time_base = "yuv420p", Fraction(1, 2)
        for grey in greys:
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), grey, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


class RequestMaker:
    """Draws requests at random, the same ones for the same seed."""

    def __init__(self, seed: int, *, modalities: tuple[str, ...]) -> None:
        self._random = random.Random(seed)
        self._images = [_make_url(make_image(index), "image/png") for index in range(_NUM_REPEATED)]
        self._audios = [_make_url(make_audio(index), "audio/wav") for index in range(3)]
        self._videos = [_make_url(make_video(index), "video/mp4") for index in range(3)]
        self._num_new = 10_000
        self._bad = _list_bad(self._images[0])
        self._good = [self._make_text, self._make_text, self._make_sampled, self._make_prompts]
        if "image" in modalities:
            self._good += [self._make_seen_image, self._make_seen_image, self._make_new_image]
            self._good += [self._make_large_image]
        if "audio" in modalities:
            self._good += [self._make_audio_request]
        if "video" in modalities:
            self._good += [self._make_video_request]

    def make_good(self) -> SoakRequest:
        return self._random.choice(self._good)()

    def make_bad(self) -> SoakRequest:
        return self._random.choice(self._bad)

    def _make_text(self) -> SoakRequest:
        index = self._random.randrange(_NUM_REPEATED)
        return self._make_chat("text", _describe(index), key=f"text {index}")

    def _make_seen_image(self) -> SoakRequest:
        index = self._random.randrange(_NUM_REPEATED)
        parts = [_make_part("image", self._images[index]), *_describe(index)]
        return self._make_chat("image seen", parts, key=f"image {index}")

    def _make_new_image(self) -> SoakRequest:
        self._num_new += 1
        url = _make_url(make_image(self._num_new), "image/png")
        return self._make_chat("image new", [_make_part("image", url), *_describe(0)])

    def _make_large_image(self) -> SoakRequest:
        """A picture with some megabytes behind its end."""
        image = make_image(0) + bytes([self._random.randrange(256)]) * 2_000_000
        parts = [_make_part("image", _make_url(image, "image/png")), *_describe(1)]
        return self._make_chat("image large", parts, key="image large")

    def _make_audio_request(self) -> SoakRequest:
        index = self._random.randrange(len(self._audios))
        parts = [_make_part("audio", self._audios[index]), *_describe(index)]
        return self._make_chat("audio", parts, key=f"audio {index}")

    def _make_video_request(self) -> SoakRequest:
        index = self._random.randrange(len(self._videos))
        parts = [_make_part("video", self._videos[index]), *_describe(index)]
        return self._make_chat("video", parts, key=f"video {index}")

    def _make_sampled(self) -> SoakRequest:
        options: dict[str, Any] = {
            "n": 2,
            "temperature": 1.0,
            "seed": 7,
            "logprobs": True,
            "top_logprobs": 3,
        }
        return self._make_chat("sampled", _describe(2), num_completions=2, **options)

    def _make_prompts(self) -> SoakRequest:
        """Make a call with two prompts."""
        body = {"prompt": ["the fox", "a river"], "max_tokens": 6, "temperature": 0}
        return self._make("prompts", COMPLETIONS, body, key="prompts", num_completions=2)

    def _make_chat(
        self,
        kind: str,
        parts: list[dict[str, Any]],
        *,
        key: str | None = None,
        num_completions: int = 1,
        **options: Any,
    ) -> SoakRequest:
        message = {"role": "user", "content": parts}
        body = {"messages": [message], "max_tokens": 12, "temperature": 0, **options}
        return self._make(kind, CHAT, body, key=key, num_completions=num_completions)

    def _make(
        self, kind: str, path: str, body: dict[str, Any], *, key: str | None, num_completions: int
    ) -> SoakRequest:
        is_streamed = self._random.random() < 0.5
        body |= {"return_token_ids": True, "stream": is_streamed}
        if is_streamed:
            body["stream_options"] = {"include_usage": True}
        return SoakRequest(
            kind=kind,
            path=path,
            content=json.dumps(body).encode(),
            key=key,
            is_streamed=is_streamed,
            num_completions=num_completions,
        )


def _list_bad(image_url: str) -> list[SoakRequest]:
    user = {"role": "user", "content": "hello"}
    good = {"messages": [user], "max_tokens": 4}

    def with_image(url: str) -> dict[str, Any]:
        return good | {"messages": [user | {"content": [_make_part("image", url)]}]}

    bodies: list[tuple[str, Any, int]] = [
        (CHAT, {}, 400),
        (CHAT, [], 400),
        (CHAT, good | {"max_tokens": -1}, 400),
        (CHAT, good | {"temperature": "hot"}, 400),
        (CHAT, good | {"n": 10**30}, 400),
        (CHAT, good | {"stop": ["a"] * 50_000}, 400),
        (CHAT, good | {"logit_bias": {"999999999": 1}}, 400),
        (CHAT, good | {"messages": [user | {"role": "robot"}]}, 400),
        (CHAT, good | {"messages": [user | {"content": "fox " * 100_000}]}, 400),
        (CHAT, good | {"model": "another-model"}, 404),
        (CHAT, with_image(image_url[:300]), 400),
        (CHAT, with_image(_make_url(b"this is no picture", "image/png")), 400),
        (CHAT, with_image("file:///etc/hostname"), 422),
        (CHAT, with_image("http://127.0.0.1:1/a.png"), 422),
        (COMPLETIONS, {"prompt": [1] * 500_000}, 400),
        (COMPLETIONS, {"prompt": [1, -1]}, 400),
        (COMPLETIONS, {"prompt": "hello", "max_tokens": 4, "seed": 0.5}, 400),
    ]
    requests = [
        SoakRequest(kind="bad", path=path, content=json.dumps(body).encode(), status=status)
        for path, body, status in bodies
    ]
    broken = (b"", b'{"messages": [', b"\xff\xfe", b"[" * 100_000)
    return requests + [
        SoakRequest(kind="bad", path=CHAT, content=content, status=400) for content in broken
    ]


def _describe(index: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": " ".join(_WORDS[index % 7 :]) + f" {index}?"}]


def _make_part(modality: str, url: str) -> dict[str, Any]:
    kind = f"{modality}_url"
    return {"type": kind, kind: {"url": url}}


def _make_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
