"""The conversations that every engine setting is compared on, the same in every run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

# What each family takes besides text.
MODALITIES: dict[str, tuple[str, ...]] = {
    "llama": (),
    "llava": ("image",),
    "llava_next": ("image",),
    "llava_onevision": ("image", "video"),
    "idefics3": ("image",),
    "smolvlm": ("image", "video"),
    "internvl": ("image", "video"),
    "qwen2_vl": ("image", "video"),
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image", "video"),
    "glm4v": ("image", "video"),
    "gemma3": ("image",),
    "gemma4": ("image", "video", "audio"),
    "gemma4_causal": ("image", "video", "audio"),
    "qwen2_audio": ("audio",),
    "audioflamingo3": ("audio",),
    "qwen2_5_omni": ("image", "video", "audio"),
    "voxtral": ("audio",),
    # New ones come last: the stress of a family is drawn by its place.
    "phi3": (),
    "aya_vision": ("image",),
    "cohere2_vision": ("image",),
    "qwen3_vl_moe": ("image", "video"),
}
FAMILIES = tuple(MODALITIES)
# Each differs from one of the other families in a processor or a flag only.
RELATIVES = (
    *("llava_next", "internvl", "glm4v", "gemma4_causal", "audioflamingo3", "aya_vision"),
    *("cohere2_vision", "qwen3_vl_moe"),
)
MAIN_FAMILIES = tuple(family for family in FAMILIES if family not in RELATIVES)
MULTIMODAL_FAMILIES = tuple(family for family in FAMILIES if MODALITIES[family])
MAIN_MULTIMODAL_FAMILIES = tuple(family for family in MAIN_FAMILIES if MODALITIES[family])
MROPE_FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v",
    "qwen2_5_omni",
)
_WORDS = ("the", "quick", "brown", "fox", "jumps", "lazy", "what", "is", "in", "this", "picture")

Video = npt.NDArray[np.uint8]  # [frames, 3, height, width]
Audio = npt.NDArray[np.float32]  # [samples], at 16 kHz
Part = str | Image.Image | Video | Audio


def with_slow_relatives(families: Sequence[str]) -> list[Any]:
    """Return families as parameters of a test of the engine, which treats relatives alike.

    Relatives are for `make test-slow`.
    """
    return [
        pytest.param(family, marks=pytest.mark.slow if family in RELATIVES else ())
        for family in families
    ]


def every_fourth(families: Sequence[str], first: int) -> list[Any]:
    """Return families as parameters of a test, most of them for `make test-slow`.

    One in four of those that are no relatives is in every run. `first` is the index of the first
    one of them, from 0 to 3. Four tests with different ones have all of them together.
    """
    chosen = [family for family in families if family not in RELATIVES][first::4]
    return [
        pytest.param(family, marks=() if family in chosen else pytest.mark.slow)
        for family in families
    ]


def in_turns(
    families: Sequence[str], settings: Mapping[str, Any], chosen: Sequence[str] | None = None
) -> list[Any]:
    """Return parameters of a test: every family with every setting, which are given by their names.

    Each chosen family has one of the settings in every run, in turns. All others are for
    `make test-slow`. By default, all families are chosen.
    """
    names = list(settings)
    chosen = families if chosen is None else chosen
    turns = {(family, names[place % len(names)]) for place, family in enumerate(chosen)}
    return [
        pytest.param(
            family,
            setting,
            id=f"{family}-{name}",
            marks=() if (family, name) in turns else pytest.mark.slow,
        )
        for family in families
        for name, setting in settings.items()
    ]


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
        return [part for part in self.parts if _get_modality(part) == "video"]

    @property
    def audio(self) -> list[Audio]:
        return [part for part in self.parts if _get_modality(part) == "audio"]

    @property
    def num_items(self) -> int:
        return sum(not isinstance(part, str) for part in self.parts)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [_make_content(part) for part in self.parts]}]

    def make_prompt(self, text: str) -> dict[str, Any]:
        """What `LLM.generate` takes, `text` being what the chat template gave."""
        media = {"image": self.images, "video": self.videos, "audio": self.audio}
        return {"prompt": text, "multi_modal_data": {k: v for k, v in media.items() if v}}


def make_image(height: int, width: int, *, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_video(frames: int, height: int, width: int, *, seed: int) -> Video:
    shape = (frames, 3, height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def make_text(num_words: int, *, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(_WORDS, num_words))


def make_audio(seconds: float, *, seed: int) -> Audio:
    """Make a melody. Noise would be alike everywhere, even in reverse."""
    generator = np.random.default_rng(seed)
    num_tones = math.ceil(seconds * 10)
    pitch = np.repeat(generator.uniform(100, 4000, num_tones), 1600)
    volume = np.repeat(generator.uniform(0.01, 0.9, num_tones), 1600)
    samples = volume * np.sin(2 * np.pi * np.cumsum(pitch) / 16_000)
    return samples[: int(16_000 * seconds)].astype(np.float32)


def make_media(modality: str, *, seed: int) -> Part:
    """Make an item that has an equally long placeholder for every seed."""
    if modality == "image":
        return make_image(84, 84, seed=seed)
    if modality == "video":
        return make_video(4, 84, 84, seed=seed)
    return make_audio(1.2, seed=seed)


def make_repeated_case(modality: str) -> Case:
    item = make_media(modality, seed=2)
    return Case(name=f"one {modality} twice", parts=("same", item, " twice ", item, "please"))


def make_cases(family: str) -> tuple[Case, ...]:
    """At least eight conversations that the family understands."""
    modalities = MODALITIES[family]
    cases = _make_text_cases()
    if modalities:
        cases = cases[:1]
    if "image" in modalities:
        cases += _make_image_cases()
    if "video" in modalities:
        cases += _make_video_cases()
    if family in MROPE_FAMILIES and family != "qwen2_5_omni":  # it has large frames
        long = make_video(24, 28, 56, seed=25)
        cases += [("a long small video", ["how long? ", long, "b"])]
    if modalities == ("audio",):
        cases += _make_audio_cases()
    elif "audio" in modalities:
        cases = cases[:4] + _make_mixed_cases()
    made = [Case(name=name, parts=tuple(parts)) for name, parts in cases]
    return tuple(case for case in made if _is_understood(family, case))


def _is_understood(family: str, case: Case) -> bool:
    """Return whether Transformers itself can run the case.

    It can't run several audio items for Audio Flamingo, nor pictures and videos together for
    families that count both as one.
    """
    if family == "audioflamingo3":
        return len(case.audio) <= 1
    return family not in ("smolvlm", "glm4v") or not (case.images and case.videos)


def _make_text_cases() -> list[tuple[str, Sequence[Part]]]:
    lengths = (6, 1, 3, 20, 35, 60, 90, 12)
    return [(f"{n} words", [make_text(n, seed=n)]) for n in lengths]


def _make_image_cases() -> list[tuple[str, Sequence[Part]]]:
    known = make_image(60, 90, seed=1)
    duplicate = make_image(100, 70, seed=2)
    return [
        ("one image", [known, "what is in this picture?"]),
        ("the same image elsewhere", ["another look at ", known, " please"]),
        ("two images", ["compare", _image(120, 50, 3), " with ", _image(40, 40, 4), "please"]),
        ("one image twice", ["same", duplicate, " twice ", duplicate, "please"]),
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
            [make_video(3, 56, 84, seed=23), "or", make_video(3, 84, 56, seed=24), "?"],
        ),
    ]


def _make_audio_cases() -> list[tuple[str, Sequence[Part]]]:
    known = make_audio(0.7, seed=30)
    other = make_audio(1.1, seed=37)
    return [
        ("one sound", [known, "transcribe this sound"]),
        ("the same sound elsewhere", ["another ear for ", known, " please"]),
        ("one sound twice", ["same", other, " twice ", other, "please"]),
        (
            "two sounds",
            ["first", make_audio(1.9, seed=31), "second", make_audio(0.4, seed=32), "?"],
        ),
        ("long text, sound", [make_text(45, seed=33), make_audio(0.9, seed=33), "ok?"]),
        ("sound, long text", [make_audio(2.3, seed=34), make_text(50, seed=34)]),
        ("a short sound", ["listen", make_audio(0.1, seed=35)]),
        ("a longer sound", [make_audio(2.9, seed=36), "count"]),
        ("only a sound", [make_audio(1.3, seed=38)]),
    ]


def _make_mixed_cases() -> list[tuple[str, Sequence[Part]]]:
    known = make_audio(0.7, seed=30)
    return [
        ("one sound", [known, "transcribe this sound"]),
        ("two sounds", [known, "or", make_audio(1.4, seed=40), "?"]),
        ("image and sound", [make_image(60, 90, seed=1), "and", known, "together"]),
        ("video", [make_video(2, 56, 56, seed=43), "describe"]),
        ("sound, video", [make_audio(0.5, seed=41), make_video(2, 84, 56, seed=41), "so?"]),
        (
            "all of them",
            [_image(56, 84, 5), known, "and", make_video(2, 84, 56, seed=42), "and", known],
        ),
    ]


def _image(height: int, width: int, seed: int) -> Image.Image:
    return make_image(height, width, seed=seed)


def _get_modality(part: Part) -> str:
    if isinstance(part, str):
        return "text"
    if isinstance(part, Image.Image):
        return "image"
    return "video" if part.ndim == 4 else "audio"


def _make_content(part: Part) -> dict[str, Any]:
    return (
        {"type": "text", "text": part} if isinstance(part, str) else {"type": _get_modality(part)}
    )
