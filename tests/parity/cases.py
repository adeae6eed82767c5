"""The conversations that every engine setting is compared on, the same in every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

FAMILIES = ("llama", "llava", "qwen2_5_vl", "gemma3")
MULTIMODAL_FAMILIES = FAMILIES[1:]
_WORDS = ("the", "quick", "brown", "fox", "jumps", "lazy", "what", "is", "in", "this", "picture")

Video = npt.NDArray[np.uint8]  # [frames, 3, height, width]
Part = str | Image.Image | Video


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One message of a user: text and media in their order."""

    name: str
    parts: tuple[Part, ...]

    @property
    def images(self) -> list[Image.Image]:
        return [part for part in self.parts if isinstance(part, Image.Image)]

    @property
    def videos(self) -> list[Video]:
        return [part for part in self.parts if isinstance(part, np.ndarray)]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [_make_content(part) for part in self.parts]}]

    def make_prompt(self, text: str) -> dict[str, Any]:
        """What `LLM.generate` takes, `text` being what the chat template gave."""
        media = {"image": self.images, "video": self.videos}
        return {"prompt": text, "multi_modal_data": {k: v for k, v in media.items() if v}}


def make_image(height: int, width: int, *, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_video(frames: int, height: int, width: int, *, seed: int) -> Video:
    shape = (frames, 3, height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def make_text(num_words: int, *, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(_WORDS, num_words))


def make_cases(family: str) -> tuple[Case, ...]:
    """At least eight conversations that the family understands."""
    cases = _make_text_cases()
    if family != "llama":
        cases = cases[:1] + _make_image_cases()
    if family == "qwen2_5_vl":
        cases += _make_video_cases()
    return tuple(Case(name=name, parts=tuple(parts)) for name, parts in cases)


def _make_text_cases() -> list[tuple[str, Sequence[Part]]]:
    lengths = (6, 1, 3, 20, 35, 60, 90, 12)
    return [(f"{n} words", [make_text(n, seed=n)]) for n in lengths]


def _make_image_cases() -> list[tuple[str, Sequence[Part]]]:
    known = make_image(60, 90, seed=1)
    twin = make_image(100, 70, seed=2)
    return [
        ("one image", [known, "what is in this picture?"]),
        ("the same image elsewhere", ["another look at ", known, " please"]),
        ("two images", ["compare", _image(120, 50, 3), " with ", _image(40, 40, 4), "please"]),
        ("one image twice", ["same", twin, " twice ", twin, "please"]),
        ("images side by side", [_image(56, 84, 5), _image(84, 56, 6), _image(84, 56, 7)]),
        ("long text, image", [make_text(45, seed=8), _image(150, 140, 8), "ok?"]),
        ("image, long text", [_image(28, 200, 9), make_text(50, seed=9)]),
        ("large and small image", [_image(400, 300, 10), "and", _image(20, 20, 11), "\n\nhm"]),
    ]


def _make_video_cases() -> list[tuple[str, Sequence[Part]]]:
    known = make_image(60, 90, seed=1)
    return [
        ("video", [make_video(6, 60, 90, seed=20), "describe"]),
        ("video and image", ["look", make_video(4, 84, 84, seed=21), "and", known, "then?"]),
        ("image, video, image", [_image(56, 56, 12), make_video(8, 56, 56, seed=22), known, "?"]),
        (
            "two videos",
            [make_video(3, 56, 84, seed=23), "or", make_video(2, 84, 56, seed=24), "?"],
        ),
    ]


def _image(height: int, width: int, seed: int) -> Image.Image:
    return make_image(height, width, seed=seed)


def _make_content(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image" if isinstance(part, Image.Image) else "video"}
