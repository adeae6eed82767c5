"""All synthetic voices of training: espeak-ng's many and flite's few."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import numpy as np

from training.samples import Split
from training.speech.espeak import Espeak, make_voice
from training.speech.flite import Flite, make_flite_voice

FLITE_SHARE = 0.25  # recordings of people, but only five


def _find_flite(folder: Path) -> Flite | None:
    """Return flite, or print the reason and return `None` where its libraries don't run."""
    try:
        return Flite(folder)
    except OSError as error:
        print(f"flite can't be used here: {error}", file=sys.stderr)
        return None


class Speaker:
    """All voices of training; there is one speaker a process, because synthesizers are global."""

    def __init__(self, folder: Path) -> None:
        self._espeak = Espeak(folder / "espeak")
        self._flite = _find_flite(folder / "flite")

    def speak(self, text: str, random: Random, split: Split) -> np.ndarray:
        """Return int16 samples at 16 kHz; the test has voices of espeak-ng alone."""
        flite = self._flite
        if flite is not None and split == "train" and random.random() < FLITE_SHARE:
            return flite.speak(text, make_flite_voice(random, flite.names))
        return self._espeak.speak(text, make_voice(random, split))
