"""Makes requests of conversations and prompts: the chat template, perception, one tokenisation.

`skip_mm_cache` is for requests that run no engine here (render, tokenize, or the engine is
elsewhere): their items bring their tensors, and the cache that leads to the core is neither read
nor changed.

The warm-up does once, before the first request, what that request would find undone: modules that
are imported late, templates that are compiled and asked, decoders, the processor's first call.
Dummies go the way of requests: as encoded files, through the same processor, with caches and counts
of their own. What fails because it is only cold is a warning. A modality that can't be prepared at
all is switched off, and a model that can't prepare text is refused.
"""

from __future__ import annotations

import base64
import copy
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sensorium.engine.inputs.chat_batch import Chat
from sensorium.engine.inputs.input_processor import InputProcessor, ProcessedRequest
from sensorium.multimodal.processing.dummy_files import exceeds_limits, make_dummy_file
from sensorium.render.chat_options import ChatOptions
from sensorium.render.prompts import EnginePrompt
from sensorium.render.renderer import ChatRenderer
from sensorium.types.errors import CapacityError, ModelError, RequestError
from sensorium.types.prompts import Prompt
from sensorium.types.sampling import SamplingParams
from sensorium.types.times import ItemTimes
from sensorium.utils.pausing import Pausing, run_through

logger = logging.getLogger(__name__)
_WORDS = "Hello"
_TYPES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that is ready for the core, and how long that took."""

    processed: ProcessedRequest
    # Stage -> seconds: to render the conversation, to perceive and tokenise, to wait for a thread.
    stages: ItemTimes


class Renderer:
    """The way from a conversation or a prompt to a request. Safe to use from several threads."""

    def __init__(self, inputs: InputProcessor, *, chat_template: str | None = None) -> None:
        self._inputs = inputs
        self._chat_template = chat_template  # the text of one in place of the model's
        self._chat_renderer = ChatRenderer(inputs.processor)

    def render(self, prompt: Prompt | Chat, params: SamplingParams, **options: Any) -> Prepared:
        """Do what `render_pausing` does, and wait for media in this thread."""
        return run_through(self.render_pausing(prompt, params, **options))

    def render_pausing(
        self,
        prompt: Prompt | Chat,
        params: SamplingParams,
        *,
        request_id: str = "",
        seed: int | None = None,
        skip_mm_cache: bool = False,
        needs_tensors: bool = True,
        cancelled: Future[None] | None = None,
    ) -> Pausing[Prepared]:
        """Return the request of a conversation or a prompt, and pause while its media is fetched.

        Raise a `RequestError` with the path of the field that is wrong. `needs_tensors` may be
        false, with `skip_mm_cache` only, if the tensors of the items will not be read.
        """
        started = time.monotonic()
        stages: dict[str, float] = {}
        rendered: Prompt | EnginePrompt
        if isinstance(prompt, Chat):
            is_counted_only = skip_mm_cache and not needs_tensors
            rendered, params = self._render_chat(prompt, params, is_counted_only=is_counted_only)
            stages["render"] = time.monotonic() - started
        else:
            rendered = prompt
        started = time.monotonic()
        processed = yield from self._inputs.process_pausing(
            request_id,
            rendered,
            params,
            seed=seed,
            skip_mm_cache=skip_mm_cache,
            needs_tensors=needs_tensors,
            cancelled=cancelled,
        )
        stages["perceive"] = time.monotonic() - started
        return Prepared(processed=processed, stages=stages)

    def warmup(self) -> None:
        """Prepare a conversation of text and one with each kind of media, and drop the results.

        No trace is left in caches and counts. What fails is a warning in the log, and a modality
        that can't be prepared is switched off. Raise a `ModelError` only if no text can be
        prepared.
        """
        try:
            with self._inputs.rehearse() as inputs:
                rehearsal = copy.copy(self)
                rehearsal._inputs = inputs
                has_template = warm_up_template(
                    self._chat_renderer,
                    chat_template=self._chat_template,
                    modalities=self._inputs.allowed_modalities,
                )
                PromptWarmup(rehearsal, self._inputs, has_template=has_template).run()
        except ModelError:
            raise
        except Exception:  # as its parts: a server must not depend on its warm-up
            logger.warning("Warmup failed", exc_info=True)

    def _render_chat(
        self, chat: Chat, params: SamplingParams, *, is_counted_only: bool
    ) -> tuple[EnginePrompt, SamplingParams]:
        prompt = self._render_prompt(chat, is_counted_only=is_counted_only)
        if chat.adapt_params is not None:
            text = prompt.token_ids if prompt.text is None else prompt.text
            params = chat.adapt_params(text, params)
        return prompt, params

    def _render_prompt(self, chat: Chat, *, is_counted_only: bool) -> EnginePrompt:
        if chat.options.chat_template is None and self._chat_template is not None:
            options = replace(chat.options, chat_template=self._chat_template)
            chat = replace(chat, options=options)
        inputs = self._inputs
        _check_num_messages(chat.messages, inputs.get_max_tokens(is_counted_only=is_counted_only))
        return chat.render(
            self._chat_renderer,
            check_length=partial(inputs.check_text, is_counted_only=is_counted_only),
        )


def _check_num_messages(messages: object, max_tokens: int | None) -> None:
    """Raise a `RequestError` if there are more messages than tokens.

    Text costs a template next to nothing, but each message takes microseconds: hundreds of
    thousands of them would take seconds before the first is tokenised.
    """
    num_messages = len(messages) if isinstance(messages, list | tuple) else 0
    if max_tokens is not None and num_messages > max_tokens:
        raise RequestError(
            f"has {num_messages} entries, but the prompt may have {max_tokens} tokens and each "
            "message needs at least one",
            path=("messages",),
        )


def warm_up_template(
    renderer: ChatRenderer, *, chat_template: str | None, modalities: tuple[str, ...]
) -> bool:
    """Return whether there is a template that takes a plain conversation."""
    plain = ChatOptions(chat_template=chat_template)

    def run() -> None:
        renderer.learn(plain, modalities)
        renderer.learn(ChatOptions(chat_template=chat_template, tools=[_TOOL]), modalities)
        renderer.render([{"role": "user", "content": _WORDS}], plain)

    return _try(run, "Chat template warmup failed")


class PromptWarmup:
    """The warm-up of one renderer, with small dummies of every modality."""

    def __init__(self, rehearsal: Renderer, inputs: InputProcessor, *, has_template: bool) -> None:
        self._rehearsal = rehearsal  # renders and leaves no trace
        self._inputs = inputs  # those of requests
        self._has_template = has_template  # conversations can be rendered

    def run(self) -> None:
        """Prepare a prompt of text, then one for each modality, for both kinds of requests.

        Raise a `ModelError` if not even text can be prepared. A modality that can't be is switched
        off: a server must not be ready for what it would refuse every time.
        """
        self._warm_up_text()
        if self._inputs.allowed_modalities:
            self._perceive("Multi-modal", skip_mm_cache=False)
            self._perceive("Readonly multi-modal", skip_mm_cache=True)
            loader = self._inputs.pipeline.loader
            _try(loader.prepare, "Warmup for media from elsewhere failed")

    def _warm_up_text(self) -> None:
        try:
            self._render(self._make_prompt(None))
        except Exception:  # a conversation may be what it can't do: then text is tried alone
            logger.warning("Text warmup failed", exc_info=True)
            try:
                self._render({"prompt": _WORDS})
            except Exception as error:  # a tokenizer may raise anything
                raise ModelError(f"no prompt of text can be prepared: {error}") from error

    def _perceive(self, name: str, *, skip_mm_cache: bool) -> None:
        started = time.monotonic()
        outcomes = [
            self._warm_up_modality(name, modality, skip_mm_cache=skip_mm_cache)
            for modality in self._inputs.allowed_modalities
        ]
        if all(outcomes):
            logger.info("%s warmup completed in %.3fs", name, time.monotonic() - started)

    def _warm_up_modality(self, name: str, modality: str, *, skip_mm_cache: bool) -> bool:
        """Return whether a small item went the way of requests. Switch off what never can."""
        try:
            self._render(self._make_prompt(modality), skip_mm_cache=skip_mm_cache)
        except Exception as error:  # a processor may raise anything
            logger.debug("%s warmup failed for %s", name, modality, exc_info=True)
            if self._is_worth_trying(modality, error, skip_mm_cache=skip_mm_cache):
                logger.warning("%s warmup failed for %s: %s", name, modality, error)
            else:
                reason = f"a small {modality} could not be prepared at start: {error}"
                self._inputs.switched_off.add(modality, reason)
            return False
        return True

    def _is_worth_trying(self, modality: str, error: Exception, *, skip_mm_cache: bool) -> bool:
        """Return whether a modality may still work after its warm-up has failed.

        It may if there was no room, if the limits allow no item as large as the dummy, or if only
        the chat template has no place for it.
        """
        limits = self._inputs.pipeline.limits
        if isinstance(error, CapacityError) or exceeds_limits(modality, limits):
            return True
        if not self._has_template:
            return False
        try:
            self._render(self._make_plain_prompt(modality), skip_mm_cache=skip_mm_cache)
        except Exception:  # as above; the first reason is the one to name
            return False
        return True

    def _make_prompt(self, modality: str | None) -> Prompt | Chat:
        """Return a conversation, or a plain prompt if the model has no template."""
        url = None if modality is None else _make_url(modality)
        if self._has_template:
            kind = f"{modality}_url"
            media = [] if url is None else [{"type": kind, kind: {"url": url}}]
            messages = [{"role": "user", "content": [*media, {"type": "text", "text": _WORDS}]}]
            return Chat(messages=messages, options=ChatOptions(), fields={})
        return {"prompt": _WORDS} if modality is None else self._make_plain_prompt(modality)

    def _make_plain_prompt(self, modality: str) -> Prompt:
        marker = self._inputs.processor.get_marker(modality)
        media = {modality: [_make_url(modality)]}
        return {"prompt": f"{marker}{_WORDS}", "multi_modal_data": media}

    def _render(self, prompt: Prompt | Chat, *, skip_mm_cache: bool = True) -> None:
        """Make a request of a prompt, and decode its tokens."""
        prepared = self._rehearsal.render(
            prompt, SamplingParams(), seed=0, skip_mm_cache=skip_mm_cache
        )
        tokenizer = self._inputs.processor.tokenizer
        tokenizer.decode(list(prepared.processed.request.prompt_token_ids))


def _make_url(modality: str) -> str:
    encoded = base64.b64encode(make_dummy_file(modality)).decode()
    return f"data:{_TYPES[modality]};base64,{encoded}"


def _try(run: Callable[[], None], failure: str) -> bool:
    try:
        run()
    except Exception:  # the contract: a server must not depend on its warm-up
        logger.warning(failure, exc_info=True)
        return False
    return True
