"""Does once, before the first request, what that would find undone: modules that are imported late,
templates that are compiled and asked, decoders, the processor's first call.

Dummies go the way of requests: as encoded files, through the same processor, in a rehearsal that
has neither the caches nor the counts of the real thing. What fails because it is only cold is a
warning. A modality that can't be prepared at all is switched off, and a model whose text can't be
prepared is refused.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sensorium.engine.inputs.chat_batch import Chat
from sensorium.engine.inputs.input_processor import InputProcessor
from sensorium.multimodal.processing.dummy_media import exceeds_limits, make_dummy_file
from sensorium.render.chat_options import ChatOptions
from sensorium.render.renderer import ChatRenderer
from sensorium.types.errors import CapacityError, ModelError
from sensorium.types.prompts import Prompt
from sensorium.types.sampling import SamplingParams

if TYPE_CHECKING:
    from sensorium.engine.inputs.renderer import Renderer

logger = logging.getLogger(__name__)
_WORDS = "Hello"
_TYPES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def warm_up_template(
    renderer: ChatRenderer, *, chat_template: str | None, modalities: tuple[str, ...]
) -> bool:
    """Whether there is one that takes a plain conversation."""
    plain = ChatOptions(chat_template=chat_template)

    def run() -> None:
        renderer.learn(plain, modalities)
        renderer.learn(ChatOptions(chat_template=chat_template, tools=[_TOOL]), modalities)
        renderer.render([{"role": "user", "content": _WORDS}], plain)

    return _try(run, "Chat template warmup failed")


class PromptWarmup:
    """`rehearsal` renders and leaves no trace; `inputs` are those of the real thing.
    `has_template`: whether conversations can be rendered.
    """

    def __init__(self, rehearsal: Renderer, inputs: InputProcessor, *, has_template: bool) -> None:
        self._rehearsal = rehearsal
        self._inputs = inputs
        self._has_template = has_template

    def run(self) -> None:
        """A prompt of text, then one for each kind of media, for both kinds of requests.

        Raises a `ModelError` if not even text can be prepared. A modality that can't is switched
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

        There was no room; or the limits allow no item as large as the dummy; or it is the chat
        template that has no place for it, and prompts without one do.
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
        """A conversation, where the model has a template for one."""
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
        """There and back: what a request is made of, and how its tokens read."""
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
