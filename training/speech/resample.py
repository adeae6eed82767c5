"""Audio at another rate: a windowed sinc as one matrix, so that a whole clip is one product.

With rates a and b in lowest terms, b outputs come from the same weights of every a inputs.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import numpy as np

SAMPLE_RATE = 16000  # of all speech here
NUM_ZEROS = 12  # of the sinc on either side


@cache
def _weights(source: int, target: int) -> tuple[np.ndarray, int]:
    """Weights [source + 2 * margin, target] of one block, and the margin around its inputs."""
    cutoff = 0.94 * min(1.0, target / source)  # as a part of the source's Nyquist frequency
    margin = int(np.ceil(NUM_ZEROS / cutoff))
    inputs = np.arange(-margin, source + margin)[:, None]
    outputs = np.arange(target)[None, :] * (source / target)
    distance = inputs - outputs
    window = np.cos(np.clip(distance / margin, -1.0, 1.0) * (np.pi / 2)) ** 2
    weights = cutoff * np.sinc(cutoff * distance) * window
    return (weights / weights.sum(0)).astype(np.float32), margin


def resample(samples: np.ndarray, source: int, target: int = SAMPLE_RATE) -> np.ndarray:
    """Float32 samples at the target rate; n samples become n * target / source."""
    samples = np.asarray(samples, np.float32)
    if source == target:
        return samples
    divisor = gcd(source, target)
    length = -(-len(samples) * target // source)
    source, target = source // divisor, target // divisor
    weights, margin = _weights(source, target)
    num_blocks = -(-len(samples) // source)
    padded = np.zeros(num_blocks * source + 2 * margin, np.float32)
    padded[margin : margin + len(samples)] = samples
    blocks = np.lib.stride_tricks.sliding_window_view(padded, source + 2 * margin)[::source]
    resampled: np.ndarray = (blocks @ weights).reshape(-1)
    return resampled[:length]


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Samples on the scale of 16-bit integers, clipped."""
    clipped: np.ndarray = np.clip(np.rint(samples), -32768, 32767)
    return clipped.astype(np.int16)
