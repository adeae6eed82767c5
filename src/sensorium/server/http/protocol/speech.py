"""The types of the requests and the streams of `/v1/audio/transcriptions` and `translations`.

Requests are forms: all values are text, and lists are fields that come several times, with or
without `[]` behind their names. An empty text means the same as no value, because a form has no
null. Answers that are not streamed have the types of `speech.formats`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, inspect

from sensorium.server.http.protocol.requests import (
    SAMPLING_FIELDS,
    FilledText,
    Unsupported,
    make_sampling_struct,
)
from sensorium.speech.formats import SPEECH_FORMATS, SpeechLogprob, TokenUsage
from sensorium.types.errors import InvariantError, RequestError, at

SPEECH_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
FILE_FIELD = "file"
_MAX_ENTRIES = 8  # of a list
_FORM_NAME = re.compile(r"([^\[\]]+)\[([^\[\]]*)\]")  # name[], name[0] or name[key]
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,20}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}

# Checked in `server.http.openai.audio`, which names what is allowed.
_Format = Annotated[str, Meta(extra_json_schema={"enum": list(SPEECH_FORMATS)})]
_Include = Annotated[str, Meta(extra_json_schema={"enum": ["logprobs"]})]
_Includes = Annotated[list[_Include], Meta(max_length=_MAX_ENTRIES)]
_Granularity = Annotated[str, Meta(extra_json_schema={"enum": ["segment", "word"]})]
_Granularities = Annotated[list[_Granularity], Meta(max_length=_MAX_ENTRIES)]
_Chunking = Annotated[Any, Meta(extra_json_schema={"enum": ["auto"]})]
_Upload = Annotated[str, Meta(extra_json_schema={"type": "string", "format": "binary"})]

if TYPE_CHECKING:

    class _SpeechSampling(Struct, frozen=True, kw_only=True):
        def __getattr__(self, name: str) -> Any: ...

else:
    _SpeechSampling = make_sampling_struct(
        "SpeechSampling", [each for each in SAMPLING_FIELDS if each.name in SPEECH_SAMPLING]
    )


class SpeechRequest(_SpeechSampling, frozen=True, kw_only=True):
    """The form fields that both speech routes have: OpenAI's, and those of similar servers."""

    # Fields that are not implemented. They are refused, because they would change the answer.
    unsupported: ClassVar[tuple[str, ...]] = ("to_language", "max_completion_tokens")

    file: Annotated[_Upload, Meta(description="Audio, or a video that has some.")]
    model: str | None = None
    language: Annotated[
        str | None, Meta(description="What is spoken, as a code (`en`) or a name (`english`).")
    ] = None
    prompt: Annotated[
        str | None, Meta(description="Text that comes before, with names or in the wanted style.")
    ] = None
    condition_on_previous_text: Annotated[
        bool | None, Meta(description="Whisper: each window is given the text before it.")
    ] = None
    response_format: _Format | None = None
    stream: Annotated[bool | None, Meta(description="Only with the formats `json` and `text`.")] = (
        None
    )
    cache_salt: FilledText | None = None
    to_language: Unsupported = None
    max_completion_tokens: Unsupported = None

    # Accepted without effect: the last event of a stream always has the token counts.
    stream_include_usage: bool | None = None
    stream_continuous_usage_stats: bool | None = None
    user: str | None = None


class TranscriptionRequest(SpeechRequest, frozen=True, kw_only=True):
    """The form of `/v1/audio/transcriptions`: a recording, and how its transcript is wanted."""

    unsupported = (*SpeechRequest.unsupported, "known_speaker_names", "known_speaker_references")

    timestamp_granularities: Annotated[
        _Granularities | None,
        Meta(description="Only with `verbose_json`. By default `segment`."),
    ] = None
    include: Annotated[_Includes | None, Meta(description="Only with `json`.")] = None
    chunking_strategy: Annotated[
        _Chunking, Meta(description="Long audio is always transcribed in parts.")
    ] = None
    known_speaker_names: Unsupported = None
    known_speaker_references: Unsupported = None


class TranslationRequest(SpeechRequest, frozen=True, kw_only=True):
    """The form of `/v1/audio/translations`: a recording in any language, and how to answer."""


class TranscriptEvent(Struct, frozen=True, kw_only=True):
    """An event of a stream: new text of a transcript, or at the end the whole of it."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[SpeechLogprob] | UnsetType = UNSET
    usage: TokenUsage | UnsetType = UNSET


def read_form_fields(
    kind: type[SpeechRequest], fields: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """Convert the texts of a form's fields to the types that the struct `kind` declares.

    `name[key]` becomes an object. Unknown fields are lists of texts. Raise a `RequestError` with
    the name of the field if a text is not a value of its type, or if a field that is no list comes
    twice.
    """
    readers = _get_readers(kind)
    grouped: dict[str, list[tuple[str | None, str]]] = {}
    for given, text in fields:
        parts = _FORM_NAME.fullmatch(given)
        name, key = (given, None) if parts is None else (parts[1], parts[2])
        if name not in readers:
            name, key = given, None
        grouped.setdefault(name, []).append((key, text))
    body = {}
    for name, entries in grouped.items():
        with at(name):
            body[name] = _read_entries(entries, readers.get(name, list))
    return {name: value for name, value in body.items() if value is not None}


def _read_entries(entries: list[tuple[str | None, str]], read: Callable[[str], Any]) -> Any:
    """Return the value of one field from its keys and texts, or `None` if it has no value.

    A key is the text in brackets behind the name, or `None`; keys of a list are empty or numbers.
    """
    texts = [text for _, text in entries]
    if any(key and not key.isdecimal() for key, _ in entries):
        return {str(key): text for key, text in entries}
    if read is list or any(key is not None for key, _ in entries):
        return texts
    if len(texts) > 1:
        raise RequestError("is given twice")
    return read(texts[0]) if texts[0] else None


def _read_integer(text: str) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise RequestError(f"must be an integer, not {text[:50]!r}")
    return int(text)


def _read_number(text: str) -> float:
    if _NUMBER.fullmatch(text) is None:
        raise RequestError(f"must be a number, not {text[:50]!r}")
    return float(text)


def _read_flag(text: str) -> bool:
    flag = _FLAGS.get(text.lower())
    if flag is None:
        raise RequestError(f"must be true or false, not {text[:50]!r}")
    return flag


_READERS: dict[type[inspect.Type], Callable[[str], Any]] = {
    inspect.BoolType: _read_flag,
    inspect.IntType: _read_integer,
    inspect.FloatType: _read_number,
    inspect.ListType: list,
}


@cache
def _get_readers(kind: type[SpeechRequest]) -> dict[str, Callable[[str], Any]]:
    """Return a map of field names to functions that read their texts; for lists that is `list`."""
    info = inspect.type_info(kind)
    if not isinstance(info, inspect.StructType):
        raise InvariantError(f"{kind} is not a struct")
    return {field.name: _find_reader(field.type) for field in info.fields}


def _find_reader(info: inspect.Type) -> Callable[[str], Any]:
    if isinstance(info, inspect.Metadata):
        return _find_reader(info.type)
    if isinstance(info, inspect.UnionType):
        found = (_find_reader(member) for member in info.types)
        return next((reader for reader in found if reader is not str), str)
    return _READERS.get(type(info), str)
