"""How chat models are asked for a transcript, and how their answers are read.

The texts are those that the authors of a model family recommend or use in their own evaluation. A
model of any other family gets a plain request. Nothing here uses a chat template or a tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sensorium.embedded import EMBEDDED_MODEL
from sensorium.speech.languages import NAMES, find_code
from sensorium.speech.options import SpeechOptions
from sensorium.types.errors import RequestError

CANNOT_TRANSLATE = "this model does not translate what is said"
SOUND = {"type": "audio", "audio": b""}  # the place of the audio in a message


class Reading(NamedTuple):
    """The transcript in an answer, and the code of its language if the model names it."""

    text: str
    language: str | None = None


def _read_plain(answer: str) -> Reading:
    return Reading(answer.strip())


def _read_tag(answer: str) -> Reading:
    """Read an answer that may begin with the language's tag, such as <|en|> (Qwen2-Audio)."""
    found = re.match(r"\s*<\|([a-z]{2,3})\|>", answer)
    if found is None:
        return Reading(answer.strip())
    return Reading(answer[found.end() :].strip(), found.group(1))


def _read_asr_text(answer: str) -> Reading:
    """Read an answer of the form "language English<asr_text>Hello." (Qwen3-ASR)."""
    head, marker, text = answer.partition("<asr_text>")
    if not marker:
        return Reading(answer.strip())
    name = head.strip().removeprefix("language").strip().lower()
    return Reading(text.strip(), None if name in ("", "none") else find_code(name))


_FRAMES = (
    "The spoken content of the audio is",
    "The transcription of the audio is",
    "The content of the input audio is",
)


def _read_framed(answer: str) -> Reading:
    """Read an answer that may be a sentence around the transcript (Audio Flamingo, GLM-ASR)."""
    text = answer.strip()
    for frame in _FRAMES:
        if text.startswith(frame):
            text = text[len(frame) :].strip().removesuffix(".").strip()
            is_quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
            return Reading(text[1:-1].strip() if is_quoted else text)
    return Reading(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """The messages with which models of a family are asked for a transcript."""

    # In all texts, `{language}` is the English name of the spoken language, `{code}` its code and
    # `{prompt}` the text that the caller gave.
    transcribe: str  # next to audio in any language
    transcribe_known: str | None = None  # if the language is given; `None`: it can't be given
    translate: str | None = None  # `None`: the model does not translate
    translate_known: str | None = None
    system: str = ""  # the system message; empty: there is none
    system_translate: str = ""
    context: str | None = None  # is added if the caller gives a prompt; `None`: it can't be given
    is_context_in_system: bool = False  # else it comes after the text next to the audio
    is_audio_first: bool = True
    prefill: str = ""  # how the answer begins, if the language is given
    languages: tuple[str, ...] | None = None  # codes; `None`: any
    max_s: float = 30.0  # the longest audio of one request, in seconds
    read: Callable[[str], Reading] = _read_plain

    @property
    def can_translate(self) -> bool:
        return self.translate is not None

    def find_language(self, options: SpeechOptions) -> str | None:
        """Return the code of the spoken language if it is given, or if the model has only one.

        Raise a `RequestError` if the language is unknown, or if this model takes none.
        """
        if options.language is None:
            return self.languages[0] if self.languages and len(self.languages) == 1 else None
        code = find_code(options.language)
        if code not in NAMES or (self.languages is not None and code not in self.languages):
            known = ", ".join(self.languages or ("en", "de", "fr", "…"))
            raise RequestError(
                f"{options.language[:50]!r} is no language that this model takes (it takes: "
                f"{known})",
                path=("language",),
            )
        if self._choose_text(options, is_known=True) is None:
            raise RequestError(
                "this model finds the language itself: leave it out", path=("language",)
            )
        return code

    def make_messages(self, options: SpeechOptions) -> list[dict[str, Any]]:
        """Return the conversation that asks for a transcript, with `SOUND` in place of the audio.

        Raise a `RequestError` if the model does not take one of the options.
        """
        code = self.find_language(options)
        if options.prompt and self.context is None:
            raise RequestError("this model takes no prompt: leave it out", path=("prompt",))
        values = {"language": NAMES[code or "en"].title(), "code": code, "prompt": options.prompt}
        text = self._choose_text(options, is_known=code is not None)
        if text is None:
            raise RequestError(CANNOT_TRANSLATE)
        system = self.system_translate if options.task == "translate" else self.system
        text, system = text.format(**values), system.format(**values)
        if options.prompt and self.context is not None:
            context = self.context.format(**values)
            if self.is_context_in_system:
                system = f"{system} {context}".strip()
            else:
                text = f"{text} {context}"
        parts = [SOUND, *([{"type": "text", "text": text}] if text else [])]
        messages: list[dict[str, Any]] = []
        if system:
            messages.append({"role": "system", "content": system})
        content = parts if self.is_audio_first else parts[::-1]
        messages.append({"role": "user", "content": content})
        if self.prefill and code is not None:
            messages.append({"role": "assistant", "content": self.prefill.format(**values)})
        return messages

    def _choose_text(self, options: SpeechOptions, *, is_known: bool) -> str | None:
        if options.task == "translate":
            return self.translate_known if is_known else self.translate
        return self.transcribe_known if is_known else self.transcribe


_CONTEXT = "Write names and words as in this text: {prompt}"
_DEFAULT = Instruction(
    transcribe="Transcribe the speech in this recording. Write only what is said.",
    transcribe_known="Transcribe the {language} speech in this recording. Write only what is said.",
    translate="Translate the speech in this recording into English. Write only the translation.",
    translate_known="Translate the {language} speech in this recording into English. Write only "
    "the translation.",
    context=_CONTEXT,
)
_GEMMA_FORM = (
    "\n\nFollow these specific instructions for formatting the answer:\n* Only output the "
    "{what}, with no newlines.\n* When transcribing numbers, write the digits, i.e. write 1.7 and "
    "not one point seven, and write 3 instead of three."
)
_GEMMA_TEXT = _GEMMA_FORM.replace("{what}", "transcription")
_GEMMA_ENGLISH = _GEMMA_FORM.replace("{what}", "translation")
_GEMMA = Instruction(
    transcribe="Transcribe the following speech segment in its original language." + _GEMMA_TEXT,
    transcribe_known="Transcribe the following speech segment in {language} into {language} text."
    + _GEMMA_TEXT,
    translate="Translate the following speech segment into English text." + _GEMMA_ENGLISH,
    translate_known="Translate the following speech segment in {language} into English text."
    + _GEMMA_ENGLISH,
    context="\n" + _CONTEXT,
)
_OMNI = Instruction(
    system="You are a speech recognition model.",
    transcribe="Transcribe the audio into text.",
    transcribe_known="Transcribe the {language} audio into text.",
    system_translate="You are a speech translation model.",
    translate="Listen to the provided speech and produce a translation in English text.",
    translate_known="Listen to the provided {language} speech and produce a translation in "
    "English text.",
    context="{prompt}",
    is_context_in_system=True,
)
_GRANITE = Instruction(
    transcribe="can you transcribe the speech into a written format?",
    transcribe_known="can you transcribe the {language} speech into a written format?",
    translate="can you translate the speech to English?",
    translate_known="can you translate the {language} speech to English?",
    context="Keywords: {prompt}",
)
_INSTRUCTIONS = {  # by `model_type`
    "qwen2_audio": Instruction(
        transcribe="Detect the language and recognize the speech:",
        transcribe_known="Detect the language and recognize the speech: <|{code}|>",
        translate="Detect the language and translate the speech into English:",
        translate_known="Detect the language and translate the speech into English: <|{code}|>",
        read=_read_tag,
    ),
    "qwen2_5_omni_thinker": _OMNI,
    "gemma3n": _GEMMA,
    "gemma4": _GEMMA,
    "granite_speech": _GRANITE,
    "granite_speech_plus": _GRANITE,
    "audioflamingo3": Instruction(
        transcribe="Transcribe the input speech.",
        transcribe_known="Transcribe the input {language} speech.",
        translate="Translate the input speech into English.",
        translate_known="Translate the input {language} speech into English.",
        context=_CONTEXT,
        is_audio_first=False,
        read=_read_framed,
    ),
    "glmasr": Instruction(
        transcribe="Please transcribe this audio into text",
        read=_read_framed,
    ),
    "qwen3_asr": Instruction(
        transcribe="",
        transcribe_known="",
        context="{prompt}",
        is_context_in_system=True,
        prefill="language {language}<asr_text>",
        read=_read_asr_text,
    ),
    # Transcripts have a prompt of special tokens (`MistralTemplate`); this is for translations.
    "voxtral": _DEFAULT,
}
_EMBEDDED = Instruction(
    transcribe="Write down what you hear.",
    transcribe_known="Write down what you hear.",
    languages=("en",),
    max_s=12.0,
)


def find_instruction(model_type: str, folder: str) -> Instruction:
    """Return a model's instruction; the name of its checkpoint's folder shows the embedded one."""
    if folder.startswith(EMBEDDED_MODEL):
        return _EMBEDDED
    return _INSTRUCTIONS.get(model_type, _DEFAULT)
