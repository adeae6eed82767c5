"""Warms up a frontend: does the work in advance that only a first request would have to do.

This is the import of modules that are imported late, the compilation of templates, the first use of
decoders and of the processor. Dummy items are processed like real ones, as encoded files, by a
renderer with its own caches and counts. A failure is a warning in the log. A modality that can't be
prepared at all is switched off, and a model that can't even prepare text is refused.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sensorium.engine.inputs.input_processor import InputProcessor, ProcessedRequest
from sensorium.engine.inputs.renderer import Chat, Renderer
from sensorium.multimodal.processing.dummy_media import exceeds_limits, make_dummy_file
from sensorium.render.messages import ChatOptions
from sensorium.types.errors import CapacityError, ModelError, RequestError
from sensorium.types.multimodal import Transfer
from sensorium.types.request import EngineCoreRequest, Prompt
from sensorium.types.sampling import SamplingParams

logger = logging.getLogger(__name__)
_WORDS = "Hello"
TEXT = "text"  # the subject of a dummy without media
_PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)  # a prompt, and two steps of one token
_TYPES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dummy:
    """A dummy request that is ready for the core, with its media."""

    subject: str  # a modality, or "text"
    request: EngineCoreRequest
    transfer: Transfer

    @staticmethod
    def make(subject: str, processed: ProcessedRequest) -> Dummy:
        """Return a dummy of a prompt that was prepared without the core's cache."""
        tensors = {item.handle.mm_hash: item.handle.kwargs or {} for item in processed.items}
        request = replace(processed.request, request_id=f"warmup-{subject}")
        return Dummy(subject=subject, request=request, transfer=Transfer(payloads=tensors))


def warm_up(renderer: Renderer) -> list[Dummy]:
    """Render and prepare a dummy prompt of text and of each modality before the first request.

    This changes no cache or counter of real requests. Raise a `ModelError` only if not even text
    can be prepared; any other failure is a warning in the log. Return what was prepared, for
    `AsyncEngine.rehearse`.
    """
    dummies: dict[str, Dummy] = {}
    try:
        with renderer.for_warmup() as for_warmup:
            has_template = (
                renderer.inputs.processor.kind.media == "in_prompt" and _warm_up_template(renderer)
            )
            _PromptWarmup(for_warmup, renderer.inputs, dummies, has_template=has_template).run()
    except ModelError:
        raise
    except Exception:  # a server must not depend on its warm-up
        logger.warning("Warmup failed, so the first requests may be slow", exc_info=True)
    return [d for d in dummies.values() if d.subject not in renderer.inputs.switched_off.reasons]


def _warm_up_template(renderer: Renderer) -> bool:
    """Compile and try the chat template, and return whether it renders a plain conversation."""
    chat_renderer, modalities = renderer.chat_renderer, renderer.inputs.allowed_modalities
    plain = ChatOptions(chat_template=renderer.chat_template)

    def run() -> None:
        chat_renderer.learn(plain, modalities)
        chat_renderer.learn(replace(plain, tools=[_TOOL]), modalities)
        chat_renderer.render([{"role": "user", "content": _WORDS}], plain)

    return _try(run, "Chat template warmup failed, so conversations may be refused")


class _PromptWarmup:
    """The part of the warm-up that prepares dummy prompts, and puts them into `dummies`.

    `renderer` is a copy with caches of its own. `inputs` is the processor for real requests, in
    which failing modalities are switched off. With `has_template`, the prompts are conversations.
    """

    def __init__(
        self,
        renderer: Renderer,
        inputs: InputProcessor,
        dummies: dict[str, Dummy],
        *,
        has_template: bool,
    ) -> None:
        self._renderer = renderer
        self._inputs = inputs
        self._dummies = dummies
        self._has_template = has_template

    def run(self) -> None:
        """Prepare a prompt of text, and of each modality with and without the core's cache."""
        if (
            self._inputs.processor.kind.media == "in_prompt"
        ):  # every prompt of the other kinds has audio
            self._warm_up_text()
        if self._inputs.allowed_modalities:
            self._process_media("Multi-modal", skip_mm_cache=False)
            self._process_media("Readonly multi-modal", skip_mm_cache=True)
            loader = self._inputs.pipeline.loader
            _try(loader.prepare, "Warmup for media URLs failed, so the first one may be slow")

    def _warm_up_text(self) -> None:
        try:
            self._render(self._make_prompt(None), TEXT)
        except Exception:  # perhaps only conversations fail, so text is tried alone
            logger.warning("Text warmup failed, trying it without a template", exc_info=True)
            try:
                self._render({"prompt": _WORDS}, TEXT)
            except Exception as error:  # a tokenizer may raise anything
                raise ModelError(f"not even a prompt of text can be prepared: {error}") from error

    def _process_media(self, name: str, *, skip_mm_cache: bool) -> None:
        started = time.monotonic()
        outcomes = [
            self._warm_up_modality(name, modality, skip_mm_cache=skip_mm_cache)
            for modality in self._inputs.allowed_modalities
        ]
        if all(outcomes):
            logger.info("%s warmup completed in %.3fs", name, time.monotonic() - started)

    def _warm_up_modality(self, name: str, modality: str, *, skip_mm_cache: bool) -> bool:
        """Return whether a small media item of this modality could be prepared.

        A failure is logged. If it would happen with every item, the modality is switched off.
        """
        try:
            self._render(self._make_prompt(modality), modality, skip_mm_cache=skip_mm_cache)
        except Exception as error:  # a processor may raise anything
            logger.debug("%s warmup failed for %s", name, modality, exc_info=True)
            if self._is_worth_trying(modality, error, skip_mm_cache=skip_mm_cache):
                logger.warning("%s warmup failed for %s (still allowed): %s", name, modality, error)
            else:
                reason = f"a small {modality} could not be prepared at start: {error}"
                self._inputs.switched_off.add(modality, reason)
            return False
        return True

    def _is_worth_trying(self, modality: str, error: Exception, *, skip_mm_cache: bool) -> bool:
        """Return whether a modality may still work although its warm-up has failed with `error`.

        It may work if there was no room for the item, if the server's limits forbid an item as
        large as the dummy, or if only the chat template can't handle the modality.
        """
        limits = self._inputs.pipeline.limits
        if isinstance(error, CapacityError) or exceeds_limits(modality, limits):
            return True
        if not self._has_template:
            return False
        try:
            self._render(self._make_plain_prompt(modality), modality, skip_mm_cache=skip_mm_cache)
        except Exception:  # a processor may raise anything; the first reason is reported
            return False
        return True

    def _make_prompt(self, modality: str | None) -> Prompt | Chat:
        """Return a dummy conversation, or a plain prompt if there is no usable chat template.

        It has text and, unless `modality` is `None`, one media item of that modality.
        """
        url = None if modality is None else _make_url(modality)
        if self._has_template:
            kind = f"{modality}_url"
            media = [] if url is None else [{"type": kind, kind: {"url": url}}]
            messages = [{"role": "user", "content": [*media, {"type": "text", "text": _WORDS}]}]
            return Chat(messages=messages, options=ChatOptions(), fields={})
        return {"prompt": _WORDS} if modality is None else self._make_plain_prompt(modality)

    def _make_plain_prompt(self, modality: str) -> Prompt:
        processor, media = self._inputs.processor, {modality: [_make_url(modality)]}
        if processor.kind.media != "in_prompt":  # such models begin with a prompt without words
            return {"prompt": "", "multi_modal_data": media}
        return {
            "prompt": f"{processor.markers.get(modality, '')}{_WORDS}",
            "multi_modal_data": media,
        }

    def _render(self, prompt: Prompt | Chat, subject: str, *, skip_mm_cache: bool = True) -> None:
        """Prepare a request for a prompt, and decode its token ids to warm up the tokenizer."""
        prepared = self._renderer.render(prompt, _PARAMS, seed=0, skip_mm_cache=skip_mm_cache)
        tokenizer = self._inputs.processor.tokenizer
        tokenizer.decode(list(prepared.processed.request.prompt_token_ids))
        self._dummies[subject] = Dummy.make(subject, prepared.processed)


def _make_url(modality: str) -> str:
    encoded = base64.b64encode(make_dummy_file(modality)).decode()
    return f"data:{_TYPES[modality]};base64,{encoded}"


def _try(run: Callable[[], None], failure: str) -> bool:
    try:
        run()
    except RequestError as error:  # something that the model lacks, in words for its clients
        logger.warning("%s: %s", failure, error)
        return False
    except Exception:  # the contract: a server must not depend on its warm-up
        logger.warning(failure, exc_info=True)
        return False
    return True
