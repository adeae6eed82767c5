"""What a caller may choose about a transcript."""

from __future__ import annotations

from dataclasses import dataclass, field

from sensorium.speech.transcript import Task
from sensorium.types.errors import RequestError
from sensorium.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOptions:
    """The options of one transcript, which hold for every family of speech models."""

    task: Task = "transcribe"
    language: str | None = None  # a code such as "en" or a name such as "english"; None: detected
    prompt: str = ""  # text that comes before the audio, with names or in the style that is wanted
    temperature: float | None = None  # None or 0: greedy, then higher if the result is bad
    # A window is given the text of the window before it (Whisper only). None: as the model says.
    carries_text: bool | None = None
    needs_segments: bool = False  # times of segments are wanted
    needs_words: bool = False  # times of words are wanted
    needs_logprobs: bool = False
    # Further parameters, such as a seed. Its temperature and its number of tokens are not used.
    sampling: SamplingParams = field(default_factory=SamplingParams)


def check_audio_alone(options: SpeechOptions) -> None:
    """Raise a `RequestError` for options that a model without text input can't follow."""
    if options.task != "transcribe":
        raise RequestError("this model does not translate: use transcribe", path=("task",))
    if options.prompt:
        raise RequestError("this model takes no prompt: leave it out", path=("prompt",))
    if options.language is not None:
        raise RequestError(
            "this model takes no language, it transcribes whatever is spoken: leave it out",
            path=("language",),
        )
