"""From conversations and prompts to requests: the chat template, perception, one tokenisation.

`skip_mm_cache` is for requests that run no engine here (render, tokenize, or the engine is
elsewhere): their items bring their tensors, and the cache that leads to the core is neither asked
nor changed.
"""

from __future__ import annotations

import copy
import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace

from sensorium.engine.chat import Chat
from sensorium.engine.input_processor import InputProcessor, ProcessedRequest
from sensorium.engine.warmup import PromptWarmup, warm_up_template
from sensorium.render.renderer import ChatRenderer
from sensorium.types.errors import ModelError
from sensorium.types.prompts import Prompt, TextPrompt
from sensorium.types.sampling import SamplingParams
from sensorium.types.times import ItemTimes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """`stages`: how long it took, in seconds: to render the conversation, to perceive and
    tokenise, and, where it had to, to wait for a thread.
    """

    processed: ProcessedRequest
    stages: ItemTimes


class Renderer:
    """Safe to use from several threads. `chat_template`: the text of one instead of the model's."""

    def __init__(self, inputs: InputProcessor, *, chat_template: str | None = None) -> None:
        self._inputs = inputs
        self._chat_template = chat_template
        self._chat_renderer = ChatRenderer(inputs.processor)

    def render_chat(
        self,
        chat: Chat,
        params: SamplingParams,
        *,
        request_id: str = "",
        seed: int | None = None,
        skip_mm_cache: bool = False,
        needs_tensors: bool = True,
        cancelled: Future[None] | None = None,
    ) -> Prepared:
        """Raises a `RequestError` that names what is wrong with the conversation. `needs_tensors`:
        whether anybody will read the items' tensors; with `skip_mm_cache` only.
        """
        started = time.monotonic()
        prompt = self._render_text(chat)
        if chat.adapt_params is not None:
            text = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
            params = chat.adapt_params(text, params)
        render_s = time.monotonic() - started
        prepared = self.render_completion(
            prompt,
            params,
            request_id=request_id,
            seed=seed,
            skip_mm_cache=skip_mm_cache,
            needs_tensors=needs_tensors,
            cancelled=cancelled,
        )
        return replace(prepared, stages={**prepared.stages, "render": render_s})

    def render_completion(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str = "",
        seed: int | None = None,
        skip_mm_cache: bool = False,
        needs_tensors: bool = True,
        cancelled: Future[None] | None = None,
    ) -> Prepared:
        """The same for a prompt of text or token ids."""
        started = time.monotonic()
        processed = self._inputs.process(
            request_id,
            prompt,
            params,
            seed=seed,
            skip_mm_cache=skip_mm_cache,
            needs_tensors=needs_tensors,
            cancelled=cancelled,
        )
        return Prepared(processed=processed, stages={"perceive": time.monotonic() - started})

    def warmup(self) -> None:
        """So that the first requests find nothing undone: the chat template, the processor with an
        item of each kind that a prompt may have, the same for requests that run no engine. Leaves
        no trace in caches and counts. What fails is a warning in the log, and a modality that
        can't be prepared is switched off. Raises a `ModelError` only if no text can be prepared.
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

    def _render_text(self, chat: Chat) -> TextPrompt:
        if chat.options.chat_template is None and self._chat_template is not None:
            options = replace(chat.options, chat_template=self._chat_template)
            chat = replace(chat, options=options)
        return chat.render(self._chat_renderer)
