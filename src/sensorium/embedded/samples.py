"""Lists the sample pictures, audio and video of the package, with questions about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MEDIA_FOLDER = Path(__file__).parent / "media"
_MEDIA_TYPES = {".png": "image/png", ".flac": "audio/flac", ".mp4": "video/mp4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMedia:
    """A picture, an audio file or a video that comes with the package for demonstrations."""

    path: Path

    @property
    def modality(self) -> str:
        return self.media_type.partition("/")[0]

    @property
    def media_type(self) -> str:
        return _MEDIA_TYPES[self.path.suffix]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSample:
    """A demonstration of the model: media files of the package, and two questions about them."""

    title: str
    files: tuple[str, ...]  # names in `MEDIA_FOLDER`
    questions: tuple[str, str]  # an empty question: it is spoken in one of the audio files

    @property
    def media(self) -> tuple[SampleMedia, ...]:
        return tuple(SampleMedia(path=MEDIA_FOLDER / name) for name in self.files)


DEMO_SAMPLES = (
    DemoSample(
        title="a picture",
        files=("shapes.png",),
        questions=("What color is the circle?", "What shape is blue?"),
    ),
    DemoSample(
        title="things to count",
        files=("count.png",),
        questions=("How many triangles are there?", "What color is the star?"),
    ),
    DemoSample(
        title="a picture of text",
        files=("digits.png",),
        questions=("What does it say?", "Read the number."),
    ),
    DemoSample(
        title="a spoken sentence",
        files=("speech.flac",),
        questions=("What was said?", "Write down what you hear."),
    ),
    DemoSample(
        title="a spoken question about the first picture",
        files=("shapes.png", "question.flac"),
        questions=("", "Where is the circle?"),
    ),
    DemoSample(
        title="a video",
        files=("moving.mp4",),
        questions=("Which way does it move?", "What color is it?"),
    ),
)
