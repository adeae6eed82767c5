"""Turns conversations into prompts: the chat template's text, and the unchanged media.

Invariants:
  1. The n-th marker of a modality in the text stands for the n-th item of that modality.
  2. No marker comes from the text of a message: such a text is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sensorium.multimodal.media import MediaItem
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.multimodal.processing.streaming_audio import StreamingAudioProcessor
from sensorium.render.chat_template import ChatTemplate, MistralTemplate, find_template
from sensorium.render.messages import ChatOptions, Message, get_media, parse_messages
from sensorium.render.prompts import EnginePrompt
from sensorium.types.errors import FieldPath, RequestError

_MAX_TEMPLATES = 16  # bounded, because each request may have a template of its own


class ChatRenderer:
    """A converter of conversations into prompts for one model, with a cache of chat templates.

    Several threads may use it at once.
    """

    def __init__(self, processor: MultiModalProcessor) -> None:
        self._hf_processor = processor.hf_processor
        self._tokenizer = processor.tokenizer
        self._markers = processor.markers
        # For models that take one audio item and no text; else `None`.
        self._audios = processor.streaming_audio
        self._pattern = re.compile("|".join(map(re.escape, self._markers.values())) or "(?!)")
        self._special_tokens: Mapping[str, str] = dict(self._tokenizer.special_tokens_map)
        is_mistral = type(self._tokenizer).__name__ == "MistralCommonBackend"
        self._mistral = MistralTemplate(self._tokenizer) if is_mistral else None
        self._get_template = lru_cache(maxsize=_MAX_TEMPLATES)(self._make_template)

    def render(
        self,
        messages: object,
        options: ChatOptions | None = None,
        *,
        check_length: Callable[[str], None] | None = None,
    ) -> EnginePrompt:
        """Return the prompt of a conversation: its text or its token ids, and its media items.

        Raise a `RequestError` with the path of the field that is wrong, or with the template's
        reason for refusing. `check_length` raises a `RequestError` if a text is too long.
        """
        options = options or ChatOptions()
        parsed = parse_messages(messages)
        media = get_media(parsed)
        if self._audios is not None:
            return _render_audio(parsed, media, self._audios)
        self._check_modalities(media)
        items = tuple(item for group in media.values() for item in group)
        if self._mistral is not None:
            # These token ids are made here. Other text is checked later, before it is tokenised.
            if check_length is not None:
                check_length(_join_text(parsed, options))
            return EnginePrompt(token_ids=self._mistral.render(parsed, options), media=items)
        self._check_no_markers(parsed)
        source = find_template(self._hf_processor, self._tokenizer, options, media.keys())
        text = self._get_template(source).render(parsed, options)
        self._check_counts(text, media)
        return EnginePrompt(
            text=text, media=items, add_special_tokens=self._needs_special_tokens(text)
        )

    def render_transcription(self, language: str | None) -> list[int] | None:
        """Return the model's own prompt for a transcript (see `MistralTemplate`), or `None`."""
        return None if self._mistral is None else self._mistral.render_transcription(language)

    def learn(self, options: ChatOptions, modalities: Sequence[str]) -> None:
        """Find out in advance what the templates accept, for text alone and for each modality."""
        if self._mistral is not None:
            return
        for kinds in ((), *((modality,) for modality in modalities)):
            source = find_template(self._hf_processor, self._tokenizer, options, kinds)
            self._get_template(source).learn(kinds)

    def _make_template(self, source: str) -> ChatTemplate:
        return ChatTemplate(source, markers=self._markers, special_tokens=self._special_tokens)

    def _needs_special_tokens(self, text: str) -> bool:
        """Return whether the tokenizer has to add special tokens to a rendered text."""
        # As in Transformers: a tokenizer adds none to a conversation, but a processor adds them
        # unless the template has written the beginning-of-sequence token.
        bos: Any = self._tokenizer.bos_token
        return self._hf_processor is not None and not (bos and text.startswith(bos))

    def _check_modalities(self, media: Mapping[str, Sequence[MediaItem]]) -> None:
        for modality in media:
            if modality not in self._markers:
                takes = ", ".join(self._markers) or "text only"
                raise RequestError(f"this model takes no {modality} (it takes: {takes})")

    def _check_no_markers(self, messages: Sequence[Message]) -> None:
        for path, text in _find_texts(messages):
            found = self._pattern.search(text)
            if found is not None:
                raise RequestError(
                    f"contains {found.group()!r}, which stands for media in this model's prompts: "
                    "remove it, and send media as content parts",
                    path,
                )

    def _check_counts(self, text: str, media: Mapping[str, Sequence[MediaItem]]) -> None:
        found = self._pattern.findall(text)
        for modality, marker in self._markers.items():
            num_markers, num_items = found.count(marker), len(media.get(modality, ()))
            if num_markers != num_items:
                raise RequestError(
                    f"the chat template wrote the media marker {marker!r} {num_markers} times, but "
                    f"the conversation has {num_items} {modality} item(s)"
                )


def _render_audio(
    messages: Sequence[Message],
    media: Mapping[str, Sequence[MediaItem]],
    audios: StreamingAudioProcessor,
) -> EnginePrompt:
    """Return the prompt of a conversation with a model that takes one audio item and no text."""
    items = [item for group in media.values() for item in group]
    if len(items) != 1 or "audio" not in media:
        raise RequestError(
            "this model transcribes one audio item: send one message with one audio part",
            path=("messages",),
        )
    for path, text in _find_texts(messages):
        if text.strip():
            raise RequestError("this model transcribes audio and takes no text: remove it", path)
    return EnginePrompt(token_ids=audios.start_token_ids, media=tuple(items))


def _find_texts(messages: Sequence[Message]) -> Iterator[tuple[FieldPath, str]]:
    """Yield the field path and the text of each piece of text in the messages."""
    for index, message in enumerate(messages):
        path = ("messages", index, "content")
        if isinstance(message.content, str):
            yield path, message.content
            continue
        for part_index, part in enumerate(message.content or ()):
            if isinstance(part, str):
                yield (*path, part_index, "text"), part


def _join_text(messages: Sequence[Message], options: ChatOptions) -> str:
    """Return all text of a conversation, with its tool calls and tools as JSON, in any order."""
    # Only the length of the text is checked, so its order has no meaning.
    calls = [call for message in messages for call in message.fields.get("tool_calls", ())]
    texts = [text for _, text in _find_texts(messages)]
    return "".join((*texts, *map(json.dumps, (*calls, *(options.tools or ())))))
