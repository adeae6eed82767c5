"""Where in a request the thing stands that an error of the engine is about.

The engine counts media by modality: "image 1" is the second image of the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MEDIA_LABEL = re.compile(r"(image|video|audio) (\d{1,9})\b")
_MODALITIES = {"input_audio": "audio", "image_pil": "image"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInput:
    """`name`: the field that holds what the model reads; `value`: what is in it.
    `structured_path`: the one that says what the answer must look like.
    """

    name: str
    value: object
    structured_path: str | None = None

    def find_path(self, message: str) -> str:
        """The part of a message that an error speaks of, or the field."""
        found = MEDIA_LABEL.match(message)
        if found is None or self.name != "messages":
            return self.name
        paths = [path for path, modality in _list_media(self.value) if modality == found.group(1)]
        index = int(found.group(2))
        return paths[index] if index < len(paths) else self.name

    def qualify(self, path: str) -> str:
        """The whole path of a field that an error calls by a part of it."""
        return path


def _list_media(messages: Any) -> Iterator[tuple[str, str]]:
    """The paths and modalities of media parts, in their order."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part_index, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind != "text":
                modality = _MODALITIES.get(kind, kind.partition("_")[0])
                yield f"messages[{index}].content[{part_index}]", modality
