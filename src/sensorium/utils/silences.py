"""Cuts long audio into pieces that end where it is quiet, so that no word is cut in two."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]
_QUIET_S = 0.2  # the length of a quiet place
_STEP_S = 0.02
_SEARCHED = 1 / 3  # the last part of a piece, in which it may end


def find_cuts(samples: Samples, rate: int, *, max_s: float) -> list[tuple[int, int]]:
    """Return the pieces [start, end) of audio, in samples, each of at most `max_s` seconds.

    A piece is cut in the middle of the quietest place in the last third of the `max_s` seconds.
    """
    most, pieces, start = int(max_s * rate), [], 0
    while len(samples) - start > most:
        first = start + int(most * (1 - _SEARCHED))
        end = first + _find_quiet(samples[first : start + most], rate)
        pieces.append((start, end))
        start = end
    return [*pieces, (start, len(samples))]


def _find_quiet(samples: Samples, rate: int) -> int:
    """Return the middle of the quietest place, by the energy of the samples."""
    step, length = max(1, int(_STEP_S * rate)), int(_QUIET_S * rate)
    energy = np.concatenate([[0.0], np.cumsum(samples.astype(np.float64) ** 2)])
    starts = np.arange(0, max(1, len(samples) - length), step)
    ends = np.minimum(starts + length, len(samples))
    quietest = int(np.argmin(energy[ends] - energy[starts]))
    return max(1, int(starts[quietest] + ends[quietest]) // 2)
