"""Does once, before the first request, what that would find undone: modules that are imported late,
templates that are compiled and asked, decoders, the processor's first call.

Dummies go the way of requests: as encoded files, through the same processor, in a rehearsal that
has neither the caches nor the counts of the real thing. Nothing here raises: who starts cold
serves all the same.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sensorium.engine.chat import Chat
from sensorium.engine.input_processor import InputProcessor
from sensorium.multimodal.dummy_files import make_dummy_file
from sensorium.render.chat_options import ChatOptions
from sensorium.render.renderer import ChatRenderer
from sensorium.types.prompts import Prompt
from sensorium.types.sampling import SamplingParams

if TYPE_CHECKING:
    from sensorium.engine.renderer import Renderer

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
        """A prompt of text, then one for each kind of media, for both kinds of requests."""
        _try(lambda: self._render(self._make_prompt(None)), "Text warmup failed")
        if self._inputs.allowed_modalities:
            self._perceive("Multi-modal", skip_mm_cache=False)
            self._perceive("Readonly multi-modal", skip_mm_cache=True)
            loader = self._inputs.perceiver.loader
            _try(loader.prepare, "Warmup for media from elsewhere failed")

    def _perceive(self, name: str, *, skip_mm_cache: bool) -> None:
        started = time.monotonic()
        outcomes = [
            _try(
                lambda modality=modality: self._render(  # type: ignore[misc]
                    self._make_prompt(modality), skip_mm_cache=skip_mm_cache
                ),
                f"{name} warmup failed for {modality}",
            )
            for modality in self._inputs.allowed_modalities
        ]
        if all(outcomes):
            logger.info("%s warmup completed in %.3fs", name, time.monotonic() - started)

    def _make_prompt(self, modality: str | None) -> Prompt | Chat:
        """A conversation, where the model has a template for one."""
        url = None if modality is None else _make_url(modality)
        if self._has_template:
            kind = f"{modality}_url"
            media = [] if url is None else [{"type": kind, kind: {"url": url}}]
            messages = [{"role": "user", "content": [*media, {"type": "text", "text": _WORDS}]}]
            return Chat(messages=messages, options=ChatOptions(), fields={})
        if modality is None:
            return {"prompt": _WORDS}
        marker = self._inputs.processor.get_marker(modality)
        return {"prompt": f"{marker}{_WORDS}", "multi_modal_data": {modality: [url]}}

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
