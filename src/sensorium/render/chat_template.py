"""Chooses a model's chat template, finds the forms of content that it takes, and renders it.

The forms (a string or a list of parts) are found by rendering a probe. Templates are the model's
code and run in Transformers' sandbox. They see roles, text and tool calls, and `{"type": "image"}`
where media stands: never a URL, never pixels.

Tokenizers of mistral-common (Voxtral) render conversations directly to tokens. An audio item
becomes one marker token, which is expanded later like those of any prompt of tokens.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from sensorium.multimodal.media import MediaItem
from sensorium.render.messages import ChatOptions, Content, Message
from sensorium.types.errors import RequestError

_PROBE = "probe7f3a"
# role -> the roles of the messages before it in a probe
_BEFORE = {"assistant": ("user",), "tool": ("user", "assistant")}
_ROLES = ("system", "user", "assistant", "tool")
_MAX_ERROR = 300
_AUDIO_PART = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
_Part = tuple[tuple[str, str], ...]  # a dict that can be a key
# "string", "text" (a list with a text part), or the fields of a media part (a list with that part
# before a text part)
_Form = str | _Part


class ChatTemplate:
    """A chat template, and which forms of message content it was found to accept.

    Several threads may use it at once.
    """

    def __init__(
        self, source: str, *, markers: Mapping[str, str], special_tokens: Mapping[str, str]
    ) -> None:
        self.source = source
        self._markers = dict(markers)  # modality -> the text that stands for an item
        self._special_tokens = dict(special_tokens)
        # (role, form of content) -> whether the template takes it. Two threads may compute the same
        # entry, with the same result.
        self._answers: dict[tuple[str, _Form], bool] = {}

    def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """Return the text of a conversation, in which a marker stands for each media item.

        Raise a `RequestError` if the template fails.
        """
        chat = [self._make_entry(message) for message in messages]
        try:
            return self._render(
                chat,
                tools=[dict(tool) for tool in options.tools or ()] or None,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **options.chat_template_kwargs,
            )
        except Exception as error:  # a template may raise anything at what it does not expect
            reason = str(error)[:_MAX_ERROR] or type(error).__name__
            raise RequestError(f"the chat template refuses this conversation: {reason}") from error

    def learn(self, modalities: Sequence[str]) -> None:
        """Find out in advance whether the template accepts text of each role, and users' media."""
        for role in _ROLES:
            for form in ("string", "text"):
                self._takes(role, form)
        for modality in modalities:
            self._make_part("user", MediaItem(path=(), modality=modality, media=None))

    def _render(self, chat: list[dict[str, Any]], **values: Any) -> str:
        rendered, _ = render_jinja_template(
            conversations=[chat], chat_template=self.source, **{**self._special_tokens, **values}
        )
        text: str = rendered[0]
        return text

    def _make_entry(self, message: Message) -> dict[str, Any]:
        role = message.role
        if role == "developer" and role not in self.source:
            role = "system"
        return {"role": role, "content": self._make_content(role, message), **message.fields}

    def _make_content(self, role: str, message: Message) -> str | list[dict[str, str]] | None:
        content = message.content
        if content is None:  # naive templates would write the word None
            return None if "tool_calls" in message.fields and "tool_calls" in self.source else ""
        if isinstance(content, str) and self._takes(role, "string"):
            return content
        if not self._takes(role, "text"):
            return self._join(content)
        parts = (content,) if isinstance(content, str) else content
        return [self._make_part(role, part) for part in parts]

    def _make_part(self, role: str, part: str | MediaItem) -> dict[str, str]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        for candidate in _make_placeholders(part.modality):
            if self._takes(role, candidate):
                return dict(candidate)
        return {"type": "text", "text": self._markers[part.modality]}

    def _join(self, content: Content) -> str:
        """Return content as one string with markers; unlike in vLLM, the parts keep their order."""
        if isinstance(content, str):
            return content
        return "\n".join(
            part if isinstance(part, str) else self._markers[part.modality] for part in content
        )

    def _takes(self, role: str, form: _Form) -> bool:
        """Return whether the template renders content in this form correctly for a role."""
        key = role, form
        if key not in self._answers:
            self._answers[key] = self._ask(role, form)
        return self._answers[key]

    def _ask(self, role: str, form: _Form) -> bool:
        parts = [{"type": "text", "text": _PROBE}]
        if isinstance(form, tuple):
            parts.insert(0, dict(form))
        chat = [self._make_filler(before) for before in _BEFORE.get(role, ())]
        chat.append({"role": role, "content": _PROBE if form == "string" else parts})
        if role == "system":
            chat.append(self._make_filler("user"))
        try:
            text = self._render(chat)
        except Exception:  # whatever a template raises, it does not take this
            return False
        if text.count(_PROBE) != 1 or text[: text.index(_PROBE)].endswith(("'", '"')):
            return False  # left out, or written as a Python or JSON list
        modality = form[0][1].removesuffix("_url") if isinstance(form, tuple) else None
        return all(text.count(self._markers[m]) == (m == modality) for m in self._markers)

    def _make_filler(self, role: str) -> dict[str, Any]:
        if self._takes(role, "string"):
            return {"role": role, "content": "a"}
        return {"role": role, "content": [{"type": "text", "text": "a"}]}


def _make_placeholders(modality: str) -> tuple[_Part, ...]:
    """Return the shapes of a media part that templates expect, each as pairs of key and value."""
    # The type alone, the type with a key of the same name, and OpenAI's type.
    kind = ("type", modality)
    url = f"{modality}_url"
    return (kind,), (kind, (modality, "")), (("type", url), (url, ""))


def find_template(
    processor: Any, tokenizer: Any, options: ChatOptions, modalities: Collection[str]
) -> str:
    """Return the text of the chat template for a conversation with media of these modalities.

    It is the caller's template (its text, or its name among the model's), else the processor's,
    else the tokenizer's. Raise a `RequestError` if there is none, or if the caller has to name one
    of several.
    """
    own = tokenizer.chat_template if processor is None else processor.chat_template
    if own is None:
        own = tokenizer.chat_template
    named: Mapping[str, str] = own if isinstance(own, Mapping) else {}
    if options.chat_template is not None:
        return named.get(options.chat_template, options.chat_template)
    if type(processor).__name__ == "SmolVLMProcessor" and "video" in modalities:
        # The templates of its checkpoints have no videos. The class has its own template for them.
        template: str = sys.modules[type(processor).__module__].DEFAULT_CHAT_TEMPLATE
        return template
    if named:
        own = named.get("tool_use") if options.tools else None
        own = own or named.get("default")
        if own is None:
            raise RequestError(
                f"must name one of the model's templates: {', '.join(sorted(named))}",
                path=("chat_template",),
            )
    if own is None:
        raise RequestError(
            "this model has no chat template, so it takes prompts and no conversations. A template "
            "may be given as chat_template, or as --chat-template to a server."
        )
    return str(own)


def get_template_text(processor: Any, tokenizer: Any) -> str:
    """Return the text of all chat templates that the model has, or an empty text if it has none."""
    texts: list[str] = []
    for owner in (processor, tokenizer):
        own = None if owner is None else owner.chat_template
        texts += own.values() if isinstance(own, Mapping) else [own or ""]
    return "\n".join(texts)


class MistralTemplate:
    """A renderer for tokenizers of mistral-common, which turn messages directly into token ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.copy(tokenizer.tokenizer)
        instruct = copy.copy(self._tokenizer.instruct_tokenizer)
        if instruct.audio_encoder is not None:
            instruct.audio_encoder = _MarkerEncoder(instruct.audio_encoder)
        self._tokenizer.instruct_tokenizer = instruct

    def render(self, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        """Return the token ids of a conversation, with one marker token for each audio item.

        Raise a `RequestError` if the tokenizer refuses the conversation, or if a template is given.
        """
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        if options.chat_template is not None or options.chat_template_kwargs:
            is_kwargs = options.chat_template is None
            raise RequestError(
                "can't be given, because this model's tokenizer has its own chat format",
                path=("chat_template_kwargs" if is_kwargs else "chat_template",),
            )
        if options.add_generation_prompt and messages[-1].role == "assistant":
            raise RequestError(
                "the last message is the assistant's: add a user's message, or set "
                "continue_final_message"
            )
        try:
            request = ChatCompletionRequest.from_openai(
                messages=[_make_mistral_entry(message) for message in messages],
                tools=[dict(tool) for tool in options.tools or ()] or None,
                continue_final_message=options.continue_final_message,
            )
            tokens: list[int] = self._tokenizer.encode_chat_completion(request).tokens
        except Exception as error:  # its validation raises errors of many kinds
            reason = str(error)[:_MAX_ERROR]
            raise RequestError(f"the tokenizer refuses this conversation: {reason}") from error
        return tokens

    def render_transcription(self, language: str | None) -> list[int] | None:
        """Return the token ids of a request for a transcript, with one marker token for the audio.

        `language` is a code such as "en". Return `None` if the tokenizer has no requests of this
        kind. Raise a `RequestError` if it does not take the language.
        """
        if self._tokenizer.instruct_tokenizer.audio_encoder is None:
            return None
        from mistral_common.protocol.transcription.request import TranscriptionRequest

        try:
            # The marker encoder does not read the audio, but it must not be empty.
            fields = {"audio": b"any", "language": language}
            request = TranscriptionRequest.model_validate(fields)
            tokens: list[int] = self._tokenizer.encode_transcription(request).tokens
        except Exception as error:  # its validation raises errors of many kinds
            reason = str(error)[:_MAX_ERROR]
            raise RequestError(
                f"the tokenizer refuses this transcript: {reason}", path=("language",)
            ) from error
        return tokens


class _MarkerEncoder:
    """A replacement for mistral-common's audio encoder that writes one marker per audio item.

    The original would decode the audio and write a token for each of its embeddings.
    """

    def __init__(self, encoder: Any) -> None:
        from mistral_common.tokens.tokenizers.audio import Audio, AudioEncoding

        # The tokenizer reads these when it writes the prompt of a transcript.
        self.audio_config, self.special_ids = encoder.audio_config, encoder.special_ids
        self._encoding = AudioEncoding(
            tokens=[encoder.begin_audio_token, encoder.audio_token],
            audio=Audio(np.zeros(1, dtype=np.float32), sampling_rate=16_000, format="wav"),
        )

    def __call__(self, _content: object) -> Any:
        return self._encoding


def _make_mistral_entry(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content: Any = message.content
    if isinstance(content, tuple):
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else _AUDIO_PART
            for part in content
        ]
    return {"role": role, "content": content, **message.fields}
