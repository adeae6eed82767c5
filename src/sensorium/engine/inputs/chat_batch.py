"""Turns the arguments of `LLM.chat` into conversations, which are rendered one by one later."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from sensorium.render.messages import ChatOptions, load_chat_template
from sensorium.render.prompts import EnginePrompt, read_options
from sensorium.render.renderer import ChatRenderer
from sensorium.types.request import TextPrompt
from sensorium.types.sampling import SamplingParams

Messages = Sequence[Mapping[str, Any]]
AdaptParams = Callable[[str | Sequence[int], SamplingParams], SamplingParams]


class ChatKwargs(TypedDict, total=False):
    """The options of `LLM.chat`."""

    # The text of a template, the path of its file, or the name of one of the model's templates.
    chat_template: str | os.PathLike[str] | None
    chat_template_kwargs: Mapping[str, Any] | None  # more variables for the template
    add_generation_prompt: bool  # a new answer begins (the default)
    continue_final_message: bool  # the last message goes on instead
    tools: Sequence[Mapping[str, Any]] | None  # with JSON schemas of their functions
    # The rest goes to the prompt, see `TextPrompt`.
    mm_processor_kwargs: Mapping[str, Any] | None
    media_io_kwargs: Mapping[str, Mapping[str, Any]] | None
    cache_salt: str | None
    priority: int


_PROMPT_FIELDS = ("mm_processor_kwargs", "media_io_kwargs", "cache_salt", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation that is not rendered to a prompt yet."""

    messages: object
    options: ChatOptions
    fields: TextPrompt  # fields for the prompt that is rendered
    # Changes the parameters to fit the rendered prompt, which is text or token ids.
    adapt_params: AdaptParams | None = None

    def render(
        self, renderer: ChatRenderer, *, check_length: Callable[[str], None] | None = None
    ) -> EnginePrompt:
        """Return the prompt of this conversation. `ChatRenderer.render` explains `check_length`."""
        options = read_options(self.fields)
        rendered = renderer.render(self.messages, self.options, check_length=check_length)
        return replace(rendered, **options)


def make_chats(messages: Messages | Sequence[Messages], options: ChatKwargs) -> list[Chat]:
    """Return the conversations in `messages`, which are one list of messages or several."""
    unknown = sorted(set(options) - set(ChatKwargs.__annotations__))
    if unknown:
        raise TypeError(f"unknown option(s): {', '.join(unknown)}")
    given = {name: value for name, value in options.items() if value is not None}
    fields: Any = {name: given.pop(name) for name in _PROMPT_FIELDS if name in given}
    given["chat_template"] = load_chat_template(options.get("chat_template"))
    chat_options = ChatOptions(**given)  # type: ignore[arg-type]
    is_many = isinstance(messages, list | tuple) and all(
        isinstance(entry, list | tuple) for entry in messages
    )
    conversations: Sequence[object] = messages if is_many else [messages]
    return [
        Chat(messages=conversation, options=chat_options, fields=fields)
        for conversation in conversations
    ]
