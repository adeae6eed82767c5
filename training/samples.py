"""What every task makes: a conversation about media that are not drawn or spoken yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from zlib import crc32

import numpy as np

Colour = tuple[float, float, float]  # red, green, blue from 0 to 1
Size = tuple[int, int]  # height and width of a canvas in pixels
Split = Literal["train", "test"]


@dataclass(slots=True)
class Sprite:
    """One thing on a canvas; lengths in pixels, the angle in radians."""

    kind: Literal["shape", "emoji", "line"]
    number: int  # of the shape or emoji in its atlas, or of the canvas's line of text
    x: float  # of its centre
    y: float
    width: float
    height: float
    angle: float = 0.0
    colour: Colour = (0.0, 0.0, 0.0)  # of shapes and lines


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text, drawn."""

    coverage: np.ndarray  # uint8 [height, width]
    letters: np.ndarray  # uint8 [width]: number of the letter in each column, from 1; 0 between

    @property
    def width(self) -> int:
        return int(self.coverage.shape[1])


@dataclass(slots=True)
class Canvas:
    """A picture, or a frame of a video; later sprites cover earlier ones."""

    background: Colour = (1.0, 1.0, 1.0)
    other_background: Colour | None = None  # it changes into this one along `gradient_angle`
    gradient_angle: float = 0.0
    sprites: list[Sprite] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)


@dataclass(slots=True)
class Turn:
    question: str
    answer: str


@dataclass(slots=True)
class Sample:
    """A conversation. Media stand before the first question.

    With `speech` something is said: an empty first question then means that what was said is all
    that was asked.
    """

    task: str
    turns: list[Turn]
    picture: Canvas | None = None
    video: list[Canvas] | None = None
    speech: str | None = None


def is_held_out(*key: object, one_in: int = 8) -> bool:
    """Whether this combination is kept for the test; the same on every machine, for ever."""
    return crc32("|".join(map(str, key)).encode()) % one_in == 0
