"""Finds file paths in prompts from this process's own code, which may read any file.

A string may be a path where a caller puts media itself: in a part `{"type": "image", "image": ...}`
of a message, and in `multi_modal_data`. The shapes of OpenAI's API, such as `image_url`, only have
URLs: an application that passes on its users' conversations opens no file for them. Requests over
HTTP don't use this: there a string is a URL or an error, and JSON has no paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from sensorium.engine.inputs.renderer import AnyPrompt, Chat

_URL = re.compile(r"(data|file|https?):|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_MODALITIES = ("image", "video", "audio")


def find_paths(prompt: AnyPrompt) -> AnyPrompt:
    """Return a copy of a prompt in which strings that are paths of media are `Path` objects.

    Malformed parts stay as they are, and are refused when the prompt is read.
    """
    if isinstance(prompt, Chat):
        messages = prompt.messages
        if not isinstance(messages, list | tuple):
            return prompt
        return replace(prompt, messages=[_find_in_message(message) for message in messages])
    media = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if not isinstance(media, Mapping):
        return prompt
    found = {modality: _find_in_media(given) for modality, given in media.items()}
    return cast(AnyPrompt, {**cast(Mapping[str, Any], prompt), "multi_modal_data": found})


def _find_in_message(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": [_find_in_part(part) for part in content]}


def _find_in_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _MODALITIES:
        return part
    return {**part} | {name: _as_path(part[name]) for name in (kind, "path") if name in part}


def _find_in_media(given: Any) -> Any:
    if isinstance(given, list):
        return [_as_path(each) for each in given]
    return _as_path(given)


def _as_path(value: Any) -> Any:
    return Path(value) if isinstance(value, str) and not _URL.match(value) else value
