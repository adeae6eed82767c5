"""A small item of any modality, for trials and for learning what a processor makes of one."""

from __future__ import annotations

import numpy as np


def make_dummy_media(modality: str, sampling_rate: int) -> object:
    generator = np.random.default_rng(0)
    if modality == "audio":
        return (0.1 * generator.standard_normal(sampling_rate)).astype(np.float32)
    shape = (112, 168, 3) if modality == "image" else (4, 112, 168, 3)
    return generator.integers(0, 256, shape, dtype=np.uint8)
