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
from sensorium.types.errors import RequestError, at

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


def parse_part(part: object) -> str | MediaPart:
    """Return the text or the media of a part, or raise a `RequestError` with the field's path."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"must be an object, not {type(part).__name__}")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise RequestError("must be a string", path=("type",))
    if kind in ("text", "refusal"):
        return _get_string(part, kind)
    if kind not in _KNOWN_TYPES:
        raise RequestError(
            f"{kind[:50]!r} is unknown (known: {', '.join(_KNOWN_TYPES)})", path=("type",)
        )
    uuid = _get_uuid(part)
    modality, item = _get_media(kind, part)
    if item is None and uuid is None:
        raise RequestError("has neither media nor a uuid")
    return MediaPart(modality=modality, item=item, uuid=uuid)


def _get_media(kind: str, part: Mapping[str, Any]) -> tuple[str, object]:
    with at(kind):
        if kind in _URL_TYPES:
            return _URL_TYPES[kind], _get_url(part.get(kind))
        if kind == "input_audio":
            return "audio", _get_input_audio(part.get(kind))
        if kind in _EMBEDS_TYPES:
            return _EMBEDS_TYPES[kind], _get_embeds(part.get(kind))
    modality = "image" if kind == "image_pil" else kind
    for name in (kind, modality, "url"):
        if part.get(name) is not None:
            value = part[name]
            return modality, _make_file_url(value) if isinstance(value, os.PathLike) else value
    if part.get("path") is not None:
        return modality, _make_file_url(_get_string(part, "path"))
    if part.get("base64") is not None:
        return modality, _decode(part, "base64")
    return modality, None


def _get_url(value: object) -> str | None:
    """OpenAI's object with a `url`, or the URL itself."""
    if value is None or isinstance(value, str):
        return value or None
    if not isinstance(value, Mapping):
        raise RequestError(f"must be an object with a url, not {type(value).__name__}")
    return None if value.get("url") is None else _get_string(value, "url")


def _get_input_audio(value: object) -> bytes | str | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"must be an object with data, not {type(value).__name__}")
    if value.get("format") is not None:
        _get_string(value, "format")  # checked only: the file itself tells its format
    if value.get("data") is None:
        return None
    return _decode(value, "data")


def _get_embeds(value: object) -> PrecomputedEmbeds | None:
    """A tensor in process, or the base64 of `decode_embeds`' msgpack."""
    if value is None or isinstance(value, PrecomputedEmbeds):
        return value
    if not isinstance(value, str | torch.Tensor):
        raise RequestError(f"must be base64 or a tensor, not {type(value).__name__}")
    given = _decode_base64(value) if isinstance(value, str) else value
    return decode_embeds(given) if isinstance(given, bytes) else PrecomputedEmbeds(given)


def _decode(part: Mapping[str, Any], name: str) -> bytes | str:
    """Return the encoded bytes in a field, or its text if that is a URL already."""
    text = _get_string(part, name)
    with at(name):
        return text if text.startswith("data:") else _decode_base64(text)


def _decode_base64(text: str) -> bytes:
    import pybase64

    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise RequestError("is not valid base64") from error


def _make_file_url(path: str | os.PathLike[str]) -> str:
    """Whether it may be read is decided where media is fetched."""
    text = os.fspath(path)
    try:
        return text if text.startswith("file:") else Path(text).absolute().as_uri()
    except UnicodeEncodeError as error:
        raise RequestError("the path of media is not valid Unicode") from error


def _get_string(part: Mapping[str, Any], name: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise RequestError(f"must be a string, not {type(value).__name__}", path=(name,))
    return value


def _get_uuid(part: Mapping[str, Any]) -> str | None:
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not uuid):
        raise RequestError("must be a string that is not empty", path=("uuid",))
    return uuid
