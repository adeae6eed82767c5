"""A small item of any modality, for trials and for learning what a processor makes of one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Seconds of sound, and height and width of pictures: two items differ in both.
_DURATIONS_S = (1.0, 1.4)
_SHAPES = ((112, 168), (140, 84))
_NUM_FRAMES = 4  # some processors stack the frames of several videos


def make_dummy_media(modality: str, sampling_rate: int, *, index: int = 0) -> object:
    """Return a small item. Those of index 0 and 1 differ in content and size."""
    generator = np.random.default_rng(index)
    if modality == "audio":
        num_samples = int(_DURATIONS_S[index] * sampling_rate)
        return (0.1 * generator.standard_normal(num_samples)).astype(np.float32)
    height, width = _SHAPES[index]
    frames = () if modality == "image" else (_NUM_FRAMES,)
    return generator.integers(0, 256, (*frames, height, width, 3), dtype=np.uint8)


def make_varied_media(modality: str, sampling_rate: int) -> Iterator[object]:
    """Items of different lengths and shapes: what a processor makes of all of them alike, it makes
    of every item. One sound is longer than the usual window of an encoder.
    """
    generator = np.random.default_rng(0)
    if modality == "audio":
        for duration_s in (1.0, 2.7, 31.0):
            num_samples = int(duration_s * sampling_rate)
            yield (0.1 * generator.standard_normal(num_samples)).astype(np.float32)
        return
    for num_frames, height, width in ((4, 112, 168), (8, 336, 224), (6, 64, 448)):
        frames = () if modality == "image" else (num_frames,)
        yield generator.integers(0, 256, (*frames, height, width, 3), dtype=np.uint8)
