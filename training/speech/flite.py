"""flite inside this process, from a plain folder: a few voices made of recordings of people.

Debian's libraries as they are. The main one wants libasound, which it never calls here, so that
lies next to it; everything is loaded by path, in order, so that nothing has to be installed.
"""

from __future__ import annotations

import ctypes
import platform
import random as random_module
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.speech.resample import resample, to_int16

VOICES = ("awb", "kal", "kal16", "rms", "slt")
VOICE_WEIGHTS = {"awb": 3, "kal": 1, "kal16": 2, "rms": 3, "slt": 4}
BASE_LIBRARIES = (
    "libasound.so.2",
    "libflite.so.1",
    "libflite_usenglish.so.1",
    "libflite_cmulex.so.1",
)


class _Wave(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


class _Voice(ctypes.Structure):  # its first fields
    _fields_ = (("name", ctypes.c_char_p), ("features", ctypes.c_void_p))


@dataclass(frozen=True, slots=True, kw_only=True)
class FliteVoice:
    name: str = "slt"
    stretch: float = 1.0  # more is slower
    speed: float = 1.0  # as of a tape: more is faster, higher and from a smaller head
    volume: float = 1.0  # below 0.5, little is clipped even at high peaks


def make_flite_voice(random: random_module.Random, names: tuple[str, ...] = VOICES) -> FliteVoice:
    weights = [VOICE_WEIGHTS[name] for name in names]
    return FliteVoice(
        name=random.choices(names, weights)[0],
        stretch=random.triangular(0.75, 1.4, 1.0),
        speed=random.triangular(0.87, 1.16, 1.0),
        volume=random.uniform(0.3, 1.0),
    )


class Flite:
    """A synthesizer with the flite voices that the folder of this architecture has."""

    def __init__(self, folder: Path) -> None:
        folder = folder / platform.machine()
        for name in BASE_LIBRARIES:
            library = ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
            if name == "libflite.so.1":
                self._library = library
        self._library.flite_text_to_wave.restype = ctypes.POINTER(_Wave)
        self._library.flite_text_to_wave.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
        self._library.delete_wave.argtypes = (ctypes.POINTER(_Wave),)
        self._library.feat_set_float.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_float)
        self._library.flite_init()
        self._voices = {
            name: self._register(name, path)
            for name in VOICES
            if (path := folder / f"libflite_cmu_us_{name}.so.1").exists()
        }
        self.names = tuple(self._voices)

    def speak(self, text: str, voice: FliteVoice) -> np.ndarray:
        """Return the spoken text as int16 samples at 16 kHz."""
        pointer = self._voices[voice.name]
        self._library.feat_set_float(pointer.contents.features, b"duration_stretch", voice.stretch)
        wave = self._library.flite_text_to_wave(text.encode(), pointer)
        if not wave:
            raise ValueError(f"flite does not say {text!r}")
        contents = wave.contents
        samples = np.ctypeslib.as_array(contents.samples, (contents.num_samples,)).astype(
            np.float32
        )
        rate = contents.sample_rate
        self._library.delete_wave(wave)
        # In steps of 500 Hz: each pair of rates has a matrix of its own.
        played_at = round(rate * voice.speed / 500) * 500
        return to_int16(resample(samples * voice.volume, played_at))

    @staticmethod
    def _register(name: str, path: Path) -> ctypes._Pointer[_Voice]:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        register = getattr(library, f"register_cmu_us_{name}")
        register.restype = ctypes.POINTER(_Voice)
        register.argtypes = (ctypes.c_char_p,)
        voice: ctypes._Pointer[_Voice] = register(None)
        return voice
