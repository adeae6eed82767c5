"""Turns conversations and prompts into requests: chat template, media, one tokenisation.

`skip_mm_cache` is for requests that this engine does not run (for render, tokenize, or an engine on
another server): their items have their tensors, and the core's cache is neither read nor changed.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

from sensorium.engine.inputs.input_processor import (
    InputProcessor,
    Outline,
    ProcessedRequest,
    ProcessKwargs,
)
from sensorium.multimodal.processing.streaming_audio import AudioStream
from sensorium.render.messages import ChatOptions, load_chat_template
from sensorium.render.prompts import EnginePrompt, read_options
from sensorium.render.renderer import ChatRenderer
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ItemTimes
from sensorium.types.request import EngineCoreRequest, Prompt, StreamSpec, TextPrompt
from sensorium.types.sampling import SamplingParams
from sensorium.utils.pausing import Pausing, run_through

Messages = Sequence[Mapping[str, Any]]
AdaptParams = Callable[[str | Sequence[int], SamplingParams], SamplingParams]


class ChatKwargs(TypedDict, total=False):
    """The keyword options of `LLM.chat`, for the chat template and for the rendered prompt."""

    # The text of a template, the path of its file, or the name of one of the model's templates.
    chat_template: str | os.PathLike[str] | None
    chat_template_kwargs: Mapping[str, Any] | None  # more variables for the template
    add_generation_prompt: bool  # a new answer begins (the default)
    continue_final_message: bool  # the last message is continued, and no answer begins
    tools: Sequence[Mapping[str, Any]] | None  # with JSON schemas of their functions
    # The rest goes to the prompt, see `TextPrompt`.
    mm_processor_kwargs: Mapping[str, Any] | None
    media_io_kwargs: Mapping[str, Mapping[str, Any]] | None
    cache_salt: str | None
    priority: int


_PROMPT_FIELDS = ("mm_processor_kwargs", "media_io_kwargs", "cache_salt", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation that was neither checked nor rendered by a chat template yet."""

    messages: object
    options: ChatOptions
    fields: TextPrompt  # fields for the prompt that is rendered
    # Changes the parameters to fit the rendered prompt, which is text or token ids.
    adapt_params: AdaptParams | None = None


AnyPrompt = Prompt | EnginePrompt | Chat


def make_chats(messages: Messages | Sequence[Messages], options: ChatKwargs) -> list[Chat]:
    """Return one `Chat` for each conversation in `messages`, all with the same options.

    Raise a `TypeError` for an unknown option, and a `RequestError` for one with a wrong value.
    """
    unknown = sorted(set(options) - set(ChatKwargs.__annotations__))
    if unknown:
        raise TypeError(f"unknown option(s) of a chat: {', '.join(unknown)}")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that is ready to be started, and the seconds that its preparation took."""

    processed: ProcessedRequest
    stages: ItemTimes  # "render", "perceive" and, in a server, "wait_thread"


class Renderer:
    """A converter of prompts and conversations into requests for the core. Thread-safe."""

    def __init__(self, inputs: InputProcessor, *, chat_template: str | None = None) -> None:
        self.inputs = inputs
        self.chat_template = chat_template  # a text that replaces the model's own template
        self.chat_renderer = ChatRenderer(inputs.processor)

    def render(
        self,
        prompt: AnyPrompt,
        params: SamplingParams,
        *,
        request_id: str = "",
        **options: Unpack[ProcessKwargs],
    ) -> Prepared:
        """Do what `render_pausing` does, and block while media is fetched."""
        return run_through(self.render_pausing(prompt, params, request_id=request_id, **options))

    def render_pausing(
        self,
        prompt: AnyPrompt,
        params: SamplingParams,
        *,
        request_id: str = "",
        **options: Unpack[ProcessKwargs],
    ) -> Pausing[Prepared]:
        """Turn a prompt or conversation into a request for the core; pause while media is fetched.

        Raise a `RequestError` with the path of the field that is wrong.
        """
        started = time.monotonic()
        stages: dict[str, float] = {}
        rendered: Prompt | EnginePrompt
        if isinstance(prompt, Chat):
            needs_tensors = options.get("needs_tensors", True)
            is_counted_only = options.get("skip_mm_cache", False) and not needs_tensors
            rendered, params = self._render_chat(prompt, params, is_counted_only=is_counted_only)
            stages["render"] = time.monotonic() - started
        else:
            rendered = prompt
        started = time.monotonic()
        processed = yield from self.inputs.process_pausing(request_id, rendered, params, **options)
        stages["perceive"] = time.monotonic() - started
        return Prepared(processed=processed, stages=stages)

    def outline_pausing(
        self,
        prompt: AnyPrompt,
        params: SamplingParams,
        *,
        cancelled: Future[None] | None = None,
    ) -> Pausing[Outline]:
        """Prepare a prompt or conversation as `InputProcessor.outline_pausing` does."""
        if isinstance(prompt, Chat):
            rendered, params = self._render_chat(prompt, params, is_counted_only=False)
            return self.inputs.outline_pausing(rendered, params, cancelled=cancelled)
        return self.inputs.outline_pausing(prompt, params, cancelled=cancelled)

    def begin_stream(
        self, params: SamplingParams, *, request_id: str, delay_ms: int | None = None
    ) -> tuple[Prepared, AudioStream]:
        """Return a request for streaming audio, and the stream of its features.

        The text is `delay_ms` behind the audio (`None`: the model's own delay). Raise a
        `RequestError` if the model takes only whole recordings, or can't have this delay.
        """
        audios, defaults = self.inputs.processor.streaming_audio, self.inputs.defaults
        if audios is None:
            raise RequestError("this model takes no streaming audio")
        delay_ms = audios.default_delay_ms if delay_ms is None else delay_ms
        num_delay_tokens = audios.count_delay_tokens(delay_ms)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=audios.make_prompt(delay_ms),
            sampling_params=params.resolve(defaults, seed=self.inputs.draw_seed()),
            eos_token_ids=defaults.eos_token_ids,
            bans=defaults.bans,
            stream=StreamSpec(num_delay_tokens=num_delay_tokens),
        )
        processed = ProcessedRequest(request=request, items=(), prompt=None)
        return Prepared(processed=processed, stages={}), AudioStream(audios, delay_ms)

    @contextmanager
    def for_warmup(self) -> Iterator[Renderer]:
        """Yield a copy for the warm-up, with caches and counters of its own."""
        with self.inputs.for_warmup() as inputs:
            renderer = copy.copy(self)
            renderer.inputs = inputs
            yield renderer

    def _render_chat(
        self, chat: Chat, params: SamplingParams, *, is_counted_only: bool
    ) -> tuple[EnginePrompt, SamplingParams]:
        inputs, options = self.inputs, chat.options
        if options.chat_template is None and self.chat_template is not None:
            options = replace(options, chat_template=self.chat_template)
        _check_num_messages(chat.messages, inputs.get_max_tokens(is_counted_only=is_counted_only))
        fields = read_options(chat.fields)
        check_length = partial(inputs.check_text, is_counted_only=is_counted_only)
        prompt = self.chat_renderer.render(chat.messages, options, check_length=check_length)
        if chat.adapt_params is not None:
            text = prompt.token_ids if prompt.text is None else prompt.text
            params = chat.adapt_params(text, params)
        return replace(prompt, **fields), params


def _check_num_messages(messages: object, max_tokens: int | None) -> None:
    """Raise a `RequestError` if a conversation has more messages than its prompt may have tokens.

    A template needs some microseconds for each message: hundreds of thousands of messages would
    take seconds before the prompt's length could be checked. With `None` nothing is checked.
    """
    num_messages = len(messages) if isinstance(messages, list | tuple) else 0
    if max_tokens is not None and num_messages > max_tokens:
        raise RequestError(
            f"has {num_messages} entries, but the prompt may have {max_tokens} tokens and each "
            "message needs at least one",
            path=("messages",),
        )
