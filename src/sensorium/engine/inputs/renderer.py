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
from functools import partial
from typing import Any

from sensorium.engine.inputs.chat_batch import Chat
from sensorium.engine.inputs.input_processor import InputProcessor, ProcessedRequest
from sensorium.engine.inputs.warmup import PromptWarmup, warm_up_template
from sensorium.render.renderer import ChatRenderer
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.prompts import Prompt, TextPrompt
from sensorium.types.sampling import SamplingParams
from sensorium.types.times import ItemTimes
from sensorium.utils.pausing import Pausing, run_through

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
        """Make a request of a conversation, or of a prompt of text or token ids; pause while its
        media is fetched.

        Raise a `RequestError` that names what is wrong with it. `needs_tensors`: whether the items'
        tensors will be read; with `skip_mm_cache` only.
        """
        started = time.monotonic()
        stages: dict[str, float] = {}
        if isinstance(prompt, Chat):
            is_counted_only = skip_mm_cache and not needs_tensors
            prompt, params = self._render_chat(prompt, params, is_counted_only=is_counted_only)
            stages["render"] = time.monotonic() - started
        started = time.monotonic()
        processed = yield from self._inputs.process_pausing(
            request_id,
            prompt,
            params,
            seed=seed,
            skip_mm_cache=skip_mm_cache,
            needs_tensors=needs_tensors,
            cancelled=cancelled,
        )
        stages["perceive"] = time.monotonic() - started
        return Prepared(processed=processed, stages=stages)

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

    def _render_chat(
        self, chat: Chat, params: SamplingParams, *, is_counted_only: bool
    ) -> tuple[TextPrompt, SamplingParams]:
        prompt = self._render_text(chat, is_counted_only=is_counted_only)
        if chat.adapt_params is not None:
            text = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
            params = chat.adapt_params(text, params)
        return prompt, params

    def _render_text(self, chat: Chat, *, is_counted_only: bool) -> TextPrompt:
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
