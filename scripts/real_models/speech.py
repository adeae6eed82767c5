"""Eleven recordings of people, with what they say, from Debian's `pocketsphinx-testdata` (BSD).

Five sentences of an audio book, five hands of cards, and a command to a robot: 16 kHz, 16 bits.
"""

from __future__ import annotations

import io
import wave
from pathlib import Path

from real_models.fetching import check_hash, fetch_from_debian

NAME = "human-speech-1"  # the number rises when the folder gets other contents
RATE = 16_000
_PACKAGE = "pocketsphinx-testdata"
_FOLDER = "usr/share/pocketsphinx/test/data"
_BOOK = "librivox/sense_and_sensibility_01_austen_64kb-"
# Path, hash, words as in the package, but for a doubled article in one sentence.
_RECORDINGS = (
    (
        f"{_BOOK}0870.wav",
        "b0557cf95c974d930577e58e46b7f068c432a6e3afcc286563d88922b2a5315c",
        "and mister john dashwood had then leisure to consider how much there might be prudently "
        "in his power to do for them",
    ),
    (
        f"{_BOOK}0880.wav",
        "fbec491ef00ee734a67f0ee318e98c51c157b479e1629ff4f4426861ecac0414",
        "he was not an ill disposed young man",
    ),
    (
        f"{_BOOK}0890.wav",
        "5793ffbdee55fb8bfd284943a6866864c832d9d4accf2661cabd39915c84ee10",
        "unless to be rather cold hearted and rather selfish is to be ill disposed",
    ),
    (
        f"{_BOOK}0920.wav",
        "40882414ef4cc51f3ff7a63bad0c8c87e7f595ffeb8209fbf756c8ebc5c28a59",
        "had he married a more amiable woman he might have been made still more respectable than "
        "he was",
    ),
    (
        f"{_BOOK}0930.wav",
        "954adbf0b56ac8a148cbe77b39ca18d76b5f2a1e1f405565bd786ce3e68a68b7",
        "he might even have been made amiable himself",
    ),
    (
        "cards/001.wav",
        "899951e768666f27c8f8b1d4090b96fe7909cae9cec01bec0a5d5d1b8a8d566e",
        "ten of clubs",
    ),
    (
        "cards/002.wav",
        "a3f9eae6fdb69a1231989e39a14d62388a6f52fb59666c76d95005318fadafec",
        "four queen of clubs",
    ),
    (
        "cards/003.wav",
        "00d283e46bc257ae479e4aa86593cadb541656eba1d19fc8abeece37f6a5a18b",
        "seven of clubs",
    ),
    (
        "cards/004.wav",
        "4c44a8177f5b128b99f078cdeb918119933155574231f1833e8840d1af09c521",
        "five five",
    ),
    (
        "cards/005.wav",
        "090f18f5f76cf8b2b43cd9e6b07823f4685a4742d9a36cd98b174a6586c18cf9",
        "eight of spades four of clubs seven of hearts",
    ),
    (
        "goforward.raw",
        "f15c60ec54059d8b66e410d0064945a0b0a04ea56e1ddca1958e493c0cf70e71",
        "go forward ten meters",
    ),
)


def make(directory: Path, scratch: Path) -> None:
    fetch_from_debian(_PACKAGE, scratch / _PACKAGE)
    directory.mkdir()
    for name, sha256, _ in _RECORDINGS:
        source = scratch / _PACKAGE / _FOLDER / name
        check_hash(source, sha256)
        content = source.read_bytes()
        content = _add_header(content) if source.suffix == ".raw" else content
        _get_path(directory, name).write_bytes(content)


def get_recordings(directory: Path) -> dict[Path, str]:
    """Files with a header, and their words."""
    return {_get_path(directory, name): words for name, _, words in _RECORDINGS}


def _get_path(directory: Path, name: str) -> Path:
    return directory / Path(name.replace("/", "-")).with_suffix(".wav")


def _add_header(samples: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(RATE)
        audio.writeframes(samples)
    return file.getvalue()
