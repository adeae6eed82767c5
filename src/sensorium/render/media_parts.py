"""One content part of a message: OpenAI's shapes, and what users of Transformers and vLLM write.

A part's media is passed on as it came: a URL stays the caller's own string, pixels are not touched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sensorium.multimodal.item_codec import PrecomputedEmbeds, decode_embeds
from sensorium.types.errors import RequestError, add_label

_MODALITIES = ("image", "video", "audio")
_URL_TYPES = {f"{modality}_url": modality for modality in _MODALITIES}
_EMBEDS_TYPES = {"image_embeds": "image", "audio_embeds": "audio"}
_KNOWN_TYPES = ("text", *_URL_TYPES, "input_audio", *_MODALITIES, "image_pil", *_EMBEDS_TYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """`item`: a URL, encoded bytes, decoded media or its embeddings; `None` if only its `uuid` was
    given.
    """

    modality: str
    item: object
    uuid: str | None = None


def parse_part(part: object, path: str) -> str | MediaPart:
    """Text, or media. `path` is where the part stands, for the error."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"{path} must be an object, not {type(part).__name__}")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise RequestError(f"{path}.type must be a string")
    if kind in ("text", "refusal"):
        return _get_string(part, kind, path)
    if kind not in _KNOWN_TYPES:
        raise RequestError(
            f"{path}.type {kind[:50]!r} is unknown (known: {', '.join(_KNOWN_TYPES)})"
        )
    uuid = _get_uuid(part, path)
    modality, item = _get_media(kind, part, path)
    if item is None and uuid is None:
        raise RequestError(f"{path} has neither media nor a uuid")
    return MediaPart(modality=modality, item=item, uuid=uuid)


def _get_media(kind: str, part: Mapping[str, Any], path: str) -> tuple[str, object]:
    if kind in _URL_TYPES:
        return _URL_TYPES[kind], _get_url(part.get(kind), f"{path}.{kind}")
    if kind == "input_audio":
        return "audio", _get_input_audio(part.get(kind), f"{path}.{kind}")
    if kind in _EMBEDS_TYPES:
        return _EMBEDS_TYPES[kind], _get_embeds(part.get(kind), f"{path}.{kind}")
    modality = "image" if kind == "image_pil" else kind
    for name in (kind, modality, "url"):
        if part.get(name) is not None:
            value = part[name]
            return modality, _make_file_url(value) if isinstance(value, os.PathLike) else value
    if part.get("path") is not None:
        return modality, _make_file_url(_get_string(part, "path", path))
    if part.get("base64") is not None:
        return modality, _decode(_get_string(part, "base64", path), f"{path}.base64")
    return modality, None


def _get_url(value: object, path: str) -> str | None:
    """OpenAI's object with a `url`, or the URL itself."""
    if value is None or isinstance(value, str):
        return value or None
    if not isinstance(value, Mapping):
        raise RequestError(f"{path} must be an object with a url, not {type(value).__name__}")
    return None if value.get("url") is None else _get_string(value, "url", path)


def _get_input_audio(value: object, path: str) -> bytes | str | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"{path} must be an object with data, not {type(value).__name__}")
    if value.get("format") is not None:
        _get_string(value, "format", path)  # the file itself says what it is
    if value.get("data") is None:
        return None
    return _decode(_get_string(value, "data", path), f"{path}.data")


def _get_embeds(value: object, path: str) -> PrecomputedEmbeds | None:
    """A tensor in process, or the base64 of `decode_embeds`' msgpack."""
    if value is None or isinstance(value, PrecomputedEmbeds):
        return value
    if not isinstance(value, str | torch.Tensor):
        raise RequestError(f"{path} must be base64 or a tensor, not {type(value).__name__}")
    given = _decode_base64(value, path) if isinstance(value, str) else value
    try:
        return decode_embeds(given) if isinstance(given, bytes) else PrecomputedEmbeds(given)
    except RequestError as error:
        raise add_label(error, path) from error


def _decode(text: str, path: str) -> bytes | str:
    """Encoded bytes, or the text itself if it is a URL already."""
    return text if text.startswith("data:") else _decode_base64(text, path)


def _decode_base64(text: str, path: str) -> bytes:
    import pybase64

    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise RequestError(f"{path} is not valid base64") from error


def _make_file_url(path: str | os.PathLike[str]) -> str:
    """Whether it may be read is decided where media is fetched."""
    text = os.fspath(path)
    try:
        return text if text.startswith("file:") else Path(text).absolute().as_uri()
    except UnicodeEncodeError as error:
        raise RequestError("the path of media is not valid Unicode") from error


def _get_string(part: Mapping[str, Any], name: str, path: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{path}.{name} must be a string, not {type(value).__name__}")
    return value


def _get_uuid(part: Mapping[str, Any], path: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not uuid):
        raise RequestError(f"{path}.uuid must be a string that is not empty")
    return uuid
