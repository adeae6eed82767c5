"""What a caller may choose about a transcript."""

from __future__ import annotations

from dataclasses import dataclass, field

from sensorium.speech.transcript import Task
from sensorium.types.errors import RequestError
from sensorium.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOptions:
    """The options of one transcript, which hold for every family of speech models.

    `sampling` has further sampling parameters of the caller, such as a seed; its temperature and
    its number of tokens are not used.
    """

    task: Task = "transcribe"
    language: str | None = None  # a code such as "en" or a name such as "english"; None: found
    prompt: str = ""  # text that comes before the sound, with names or in the style that is wanted
    temperature: float | None = None  # None or 0: greedy, and higher ones if the result is bad
    # A window of a long sound is given the text before it (Whisper only). None: as the model says.
    carries_text: bool | None = None
    needs_segments: bool = False  # times of segments are wanted
    needs_words: bool = False  # times of words are wanted
    needs_logprobs: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)


def check_audio_alone(options: SpeechOptions) -> None:
    """Raise a `RequestError` if a model is asked for a task, a prompt or a language.

    This is for models that take nothing but the sound.
    """
    if options.task != "transcribe":
        raise RequestError("this model does not translate: use transcribe", path=("task",))
    if options.prompt:
        raise RequestError("this model takes no prompt: leave it out", path=("prompt",))
    if options.language is not None:
        raise RequestError(
            "this model can't be told a language, it writes down what it takes: leave it out",
            path=("language",),
        )
