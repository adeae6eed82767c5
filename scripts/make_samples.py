"""Makes the media that come with the package: `sensorium demo` and the examples show them.

    pip install espeakng-loader
    python scripts/make_samples.py [FOLDER]

Pictures are drawn, speech is spoken by espeak-ng, the video is encoded by FFmpeg. Nothing is taken
from elsewhere; all of it may be used by anybody for anything.
"""

from __future__ import annotations

import argparse
import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import soxr  # type: ignore[import-untyped]
from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).parent.parent / "src" / "sensorium" / "embedded" / "media"
_SIDE = 224
_FINENESS = 4  # drawn so many times larger, for smooth edges
_VIDEO_SIDE = 112
_NUM_FRAMES = 8
_FPS = 4
_RATE = 16_000
_PEAK = 0.6
_WORDS_A_MINUTE = 150
_SPOKEN = {
    "speech.flac": "seven green birds",
    "question.flac": "what color is the square",
}
Point = tuple[float, float]
Samples = npt.NDArray[np.float32]


def draw_shapes() -> Image.Image:
    """A red circle and a blue square."""
    with _Drawing(_SIDE, "#ffffff") as drawing:
        drawing.add_circle((64, 80), 40, "#e61a1f")
        drawing.add_polygon((160, 150), 52, "#1f52e0", num_corners=4, angle=math.pi / 4)
    return drawing.image


def draw_count() -> Image.Image:
    """Three green triangles and a yellow star, on a dark background."""
    with _Drawing(_SIDE, "#202634") as drawing:
        for center in ((56, 60), (164, 72), (68, 164)):
            drawing.add_polygon(center, 34, "#1f9e38", num_corners=3)
        drawing.add_polygon((164, 168), 38, "#fae01a", num_corners=5, inner=0.4)
    return drawing.image


def draw_digits() -> Image.Image:
    with _Drawing(_SIDE, "#f6f1e4") as drawing:
        drawing.add_text((_SIDE / 2, _SIDE / 2), "4071", "#101010", height=72)
    return drawing.image


def draw_frame(share: float) -> Image.Image:
    """An orange circle on its way from left to right."""
    with _Drawing(_VIDEO_SIDE, "#ffffff") as drawing:
        drawing.add_circle((20 + share * (_VIDEO_SIDE - 40), _VIDEO_SIDE / 2), 16, "#fa8c0f")
    return drawing.image


class _Drawing:
    """Lengths are pixels of the finished picture, which `image` is in the end."""

    def __init__(self, side: int, background: str) -> None:
        self._side = side
        self._canvas = Image.new("RGB", (side * _FINENESS, side * _FINENESS), background)
        self._draw = ImageDraw.Draw(self._canvas)
        self.image = self._canvas

    def __enter__(self) -> _Drawing:
        return self

    def __exit__(self, *_: object) -> None:
        size = (self._side, self._side)
        self.image = self._canvas.resize(size, Image.Resampling.LANCZOS)

    def add_circle(self, center: Point, radius: float, colour: str) -> None:
        (x, y), reach = center, radius
        box = [x - reach, y - reach, x + reach, y + reach]
        self._draw.ellipse([_FINENESS * value for value in box], fill=colour)

    def add_polygon(
        self,
        center: Point,
        radius: float,
        colour: str,
        *,
        num_corners: int,
        angle: float = 0.0,
        inner: float | None = None,
    ) -> None:
        """Draw a polygon or a star, with inner corners at the share `inner` of its radius."""
        reaches = [1.0] if inner is None else [1.0, inner]
        num_points = num_corners * len(reaches)
        points = []
        for index in range(num_points):
            turn = angle + 2 * math.pi * index / num_points
            reach = radius * reaches[index % len(reaches)]
            points.append(
                (
                    _FINENESS * (center[0] + reach * math.sin(turn)),
                    _FINENESS * (center[1] - reach * math.cos(turn)),
                )
            )
        self._draw.polygon(points, fill=colour)

    def add_text(self, center: Point, text: str, colour: str, *, height: float) -> None:
        place = (_FINENESS * center[0], _FINENESS * center[1])
        font: Any = ImageFont.load_default(size=_FINENESS * height)
        self._draw.text(place, text, fill=colour, font=font, anchor="mm")


def speak(texts: Sequence[str]) -> list[Samples]:
    """By espeak-ng's plain American voice, at 16,000 samples a second."""
    import espeakng_loader  # type: ignore[import-not-found]  # a tool of this script alone

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    synchronous, without_buffer, utf8, rate_parameter = 2, 0, 1, 1
    data_path = espeakng_loader.get_data_path().encode()
    rate = library.espeak_Initialize(synchronous, without_buffer, data_path, 0)
    if rate <= 0:
        raise SystemExit(f"espeak-ng can't be started: {rate}")
    pieces: list[npt.NDArray[np.int16]] = []

    def collect(samples: Any, num_samples: int, _: Any) -> int:
        if samples and num_samples:
            pieces.append(np.ctypeslib.as_array(samples, (num_samples,)).copy())
        return 0

    samples_pointer = ctypes.POINTER(ctypes.c_short)
    make_callback = ctypes.CFUNCTYPE(ctypes.c_int, samples_pointer, ctypes.c_int, ctypes.c_void_p)
    callback = make_callback(collect)  # must live as long as the library may call it
    library.espeak_SetSynthCallback(callback)
    library.espeak_SetVoiceByName(b"en-us")
    library.espeak_SetParameter(rate_parameter, _WORDS_A_MINUTE, 0)
    spoken = []
    for text in texts:
        pieces.clear()
        encoded = text.encode()
        library.espeak_Synth(encoded, len(encoded) + 1, 0, 0, 0, utf8, None, None)
        library.espeak_Synchronize()
        samples = soxr.resample(np.concatenate(pieces).astype(np.float32), rate, _RATE)
        spoken.append((samples * (_PEAK / np.abs(samples).max())).astype(np.float32))
    return spoken


def write_flac(samples: Samples, path: Path) -> None:
    integers = np.rint(samples * 32767).astype(np.int16)
    with av.open(path, "w", format="flac") as container:
        stream: Any = container.add_stream("flac", rate=_RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(integers[None], format="s16", layout="mono")
        frame.sample_rate = _RATE
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def write_video(frames: Sequence[Image.Image], path: Path) -> None:
    with av.open(path, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=_FPS, options={"crf": "16"})
        stream.width, stream.height, stream.pix_fmt = (*frames[0].size, "yuv420p")
        stream.thread_count = 1  # the same bytes again
        for image in frames:
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24"))
            )
        container.mux(stream.encode(None))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the media that come with the package.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    draw_shapes().save(folder / "shapes.png", optimize=True)
    draw_count().save(folder / "count.png", optimize=True)
    draw_digits().save(folder / "digits.png", optimize=True)
    for name, samples in zip(_SPOKEN, speak(list(_SPOKEN.values())), strict=True):
        write_flac(samples, folder / name)
    shares = [index / (_NUM_FRAMES - 1) for index in range(_NUM_FRAMES)]
    write_video([draw_frame(share) for share in shares], folder / "moving.mp4")
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:>8,}  {path.name}")


if __name__ == "__main__":
    main()
