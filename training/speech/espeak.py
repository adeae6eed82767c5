"""espeak-ng inside this process, from a plain folder: many voices, fast.

The library is one global synthesizer: one `Espeak` a process, one thread at a time. The folder is
laid out by `training.assets_speech`.
"""

from __future__ import annotations

import ctypes
import platform
import random as random_module
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.samples import Split
from training.speech.resample import resample, to_int16

ACCENTS = (
    "en-us",
    "en-us-nyc",
    "en",  # of Great Britain
    "en-gb-x-rp",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-gb-scotland",
    "en-029",
)
ACCENT_WEIGHTS = (8, 1, 3, 2, 1, 1, 1, 1)

# Left out: whispers, monsters, and voices for which Whisper tiny.en mistook about half the words.
VARIANTS = (
    *("", "m1", "m2", "m4", "m7", "m8", "f1", "f3", "f4", "Alex", "Alicia", "Andrea"),
    *("Denis", "Diogo", "Gene2", "Henrique", "Hugo", "Lee", "Marco", "Mario"),
    *("Mike", "Reed", "RicishayMax", "RicishayMax3", "Storm", "Tweaky", "UniRobot", "adam"),
    *("anika", "antonio", "aunty", "belinda", "benjamin", "boris", "caleb"),
    *("david", "ed", "edward2", "grandma", "grandpa", "gustave", "ian", "iven2", "iven3", "john"),
    *("kaukovalta", "klatt", "klatt2", "klatt4", "marcelo", "max", "mike2", "norbert"),
    *("pablo", "paul", "pedro", "quincy", "rob", "robert"),
    *("sandro", "steph2", "steph3", "travis", "victor", "zac"),
)
TEST_VARIANTS = (  # never used in training
    *("m3", "Nguyen", "Michael", "Gene", "edward", "miguel", "iven", "michel"),
    *("f2", "f5", "Annie", "linda", "shelby", "steph"),
)

AUDIO_OUTPUT_SYNCHRONOUS = 2
CHARS_UTF8 = 1
RATE, VOLUME, PITCH, RANGE, WORDGAP = 1, 2, 3, 4, 7
SynthCallback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    accent: str = "en-us"
    variant: str = ""  # the plain voice
    rate: int = 160  # words a minute
    pitch: int = 50  # 0 to 99
    pitch_range: int = 50  # 0 to 99: monotonous to lively
    volume: int = 100  # 0 to 200; over 100 it may clip
    word_gap: int = 0  # in units of 10 ms


def make_voice(random: random_module.Random, split: Split) -> Voice:
    variants = VARIANTS if split == "train" else TEST_VARIANTS
    return Voice(
        accent=random.choices(ACCENTS, ACCENT_WEIGHTS)[0],
        variant=random.choice(variants),
        rate=int(random.triangular(110, 215, 155)),
        pitch=random.randint(20, 80),
        pitch_range=random.randint(20, 90),
        volume=random.randint(40, 110),
        word_gap=random.choice((0, 0, 0, 1, 2, 5)),
    )


class Espeak:
    """A synthesizer with espeak-ng's library and data from a folder, for this architecture."""

    def __init__(self, folder: Path) -> None:
        folder = folder / platform.machine()
        self._library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
        self._chunks: list[bytes] = []
        self._callback = SynthCallback(self._receive)  # kept: the library holds no reference
        self._rate = self._library.espeak_Initialize(
            AUDIO_OUTPUT_SYNCHRONOUS, 0, str(folder).encode(), 0
        )
        if self._rate <= 0:
            raise OSError(f"espeak-ng does not start from {folder}")
        self._library.espeak_SetSynthCallback(self._callback)
        self._name = ""

    def speak(self, text: str, voice: Voice) -> np.ndarray:
        """Return the spoken text as int16 samples at 16 kHz."""
        name = f"{voice.accent}+{voice.variant}" if voice.variant else voice.accent
        if name != self._name:
            if self._library.espeak_SetVoiceByName(name.encode()) != 0:
                raise ValueError(f"espeak-ng has no voice {name}")
            self._name = name
        for parameter, setting in (
            (RATE, voice.rate),
            (VOLUME, voice.volume),
            (PITCH, voice.pitch),
            (RANGE, voice.pitch_range),
            (WORDGAP, voice.word_gap),
        ):
            self._library.espeak_SetParameter(parameter, setting, 0)
        self._chunks.clear()
        encoded = text.encode() + b"\0"
        self._library.espeak_Synth(
            encoded, ctypes.c_size_t(len(encoded)), 0, 0, 0, CHARS_UTF8, None, None
        )
        self._library.espeak_Synchronize()
        samples = np.frombuffer(b"".join(self._chunks), np.int16)
        return to_int16(resample(samples, self._rate))

    def _receive(self, samples: ctypes.Array[ctypes.c_short], count: int, _events: int) -> int:
        if samples and count > 0:
            self._chunks.append(ctypes.string_at(samples, 2 * count))
        return 0
