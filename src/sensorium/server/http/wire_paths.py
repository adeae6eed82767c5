"""Where in a client's request the field stands that an error of the engine is about.

The engine calls fields by its own names: `multi_modal_data.image[1]` is the second image of a
prompt. Only HTTP can tell which part of which message that was, or which of the ways to ask for
structured output the client has used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sensorium.types.errors import FieldPath

_MEDIA_FIELDS = ("multi_modal_data", "multi_modal_uuids")
_PROMPT_FIELDS = ("prompt", "prompt_token_ids")
# Types of content parts that don't begin with their modality -> the modality.
_MODALITIES = {"input_audio": "audio"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePaths:
    """The places of one request. It holds no media: an error may come late."""

    # What the model reads. Errors that name no field are about it.
    input: FieldPath
    # The text or the tokens of the prompt, where that is another field than `input`.
    prompt: FieldPath | None = None
    # modality -> the places of its items, in their order
    media: Mapping[str, Sequence[FieldPath]] = field(default_factory=dict)
    # The field that says what the answer must look like, if it isn't `structured_outputs`.
    structured: FieldPath | None = None
    # field of the engine -> the place of that field
    fields: Mapping[str, FieldPath] = field(default_factory=dict)

    def find(self, path: FieldPath) -> FieldPath:
        """Return the place in the request for a path of the engine."""
        if not path:
            return self.input
        name, *rest = path
        if name in _MEDIA_FIELDS:
            return self._find_item(rest)
        if name in _PROMPT_FIELDS:
            return self.input if self.prompt is None else self.prompt
        if name == "structured_outputs" and self.structured is not None:
            return self.structured
        own = self.fields.get(str(name))
        return path if own is None else (*own, *rest)

    def _find_item(self, rest: Sequence[str | int]) -> FieldPath:
        modality, index = (*rest, None, None)[:2]
        places = self.media.get(str(modality), ())
        is_known = isinstance(index, int) and 0 <= index < len(places)
        return places[index] if is_known else self.input  # type: ignore[index]


def make_chat_paths(messages: Any, structured: FieldPath | None = None) -> WirePaths:
    """Return the places of a conversation: its media stands in parts of its messages."""
    media: dict[str, list[FieldPath]] = {}
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part_index, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind != "text":
                modality = _MODALITIES.get(kind, kind.partition("_")[0])
                place = ("messages", index, "content", part_index)
                media.setdefault(modality, []).append(place)
    return WirePaths(input=("messages",), media=media, structured=structured)


def make_prompt_paths(structured: FieldPath | None = None) -> WirePaths:
    """Return the places of a request with prompts of text or tokens, and no media."""
    return WirePaths(input=("prompt",), structured=structured)
