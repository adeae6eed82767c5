"""Turns a prompt into a request that the core can run, with handles of its media."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

from sensorium.core.admission import check_length
from sensorium.engine.inputs.rendered_prompt import (
    ItemReader,
    read_items,
    rename_items,
    take_items,
)
from sensorium.engine.inputs.switched_off import SwitchedOff
from sensorium.grammar.compiler import GrammarCompiler
from sensorium.multimodal.decoding.decoding import resolve_decode_options, resolve_options
from sensorium.multimodal.media import ProcessingOptions
from sensorium.multimodal.names import UuidScope
from sensorium.multimodal.pipeline import CachedItem, MediaPipeline, OutlinedItem
from sensorium.multimodal.placeholders import (
    ExpandedPrompt,
    LaidOutItem,
    TextLength,
    expand_text,
    expand_token_ids,
    place_items,
)
from sensorium.multimodal.processing.cost_guard import check_processor_kwargs
from sensorium.multimodal.processing.item_spec import ItemSpecs
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.render.prompts import EnginePrompt, RenderedMedia, read_prompt
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalFeatureSpec, MultiModalKwargsItem, Payload
from sensorium.types.request import EngineCoreRequest, Prompt
from sensorium.types.restrictions import Restrictions
from sensorium.types.sampling import GenerationDefaults, SamplingParams, TokenBans
from sensorium.utils.pausing import Pausing, run_through

logger = logging.getLogger(__name__)
_COUNTED_CONTEXTS = 4  # the longest text that is only tokenised and counted, in contexts
_Expanded = tuple[list[int], list[MultiModalFeatureSpec], list[CachedItem]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """A request for the core, with media handles to release once, by `InputProcessor.release`."""

    request: EngineCoreRequest
    items: tuple[CachedItem, ...]  # one handle per item of media
    prompt: str | None  # the text, if text was given
    is_readonly: bool = False  # the handles belong to the read-only cache, not to the core's


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A prompt that is ready for an engine in another process, which will process its media."""

    prompt: EnginePrompt
    params: SamplingParams
    items: tuple[OutlinedItem, ...] = ()  # its media, in the order of the prompt's `media`
    text: str | None = None  # the prompt before it was tokenised, if text was given


class ProcessKwargs(TypedDict, total=False):
    """The keyword options of `InputProcessor.process` and `InputProcessor.process_pausing`."""

    seed: int | None  # for a request that has none; `None`: one is drawn
    # The items have their tensors, and the cache that the core mirrors is neither read nor changed.
    skip_mm_cache: bool
    needs_tensors: bool  # false, with `skip_mm_cache`: items may come without their tensors
    cancelled: Future[None] | None  # ends when the request is no longer wanted


class InputProcessor:
    """A converter of prompts into requests for the core, for one model. Thread-safe.

    It checks a prompt, processes its media items, tokenises its text, and replaces each media
    marker with placeholder tokens.
    """

    def __init__(
        self,
        processor: MultiModalProcessor,
        *,
        pipeline: MediaPipeline,
        # For requests that this engine does not run; the cache of `pipeline` is not touched.
        readonly: MediaPipeline | None = None,
        defaults: GenerationDefaults,
        limit_mm_per_prompt: Mapping[str, int],
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        media_io_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        trust_injected: bool = False,  # hashes from other machines are used as they are
        seed: int,
        # The core's compiler, if the core is in this process. Otherwise grammars are also
        # compiled here, so that a bad one is not sent to the core.
        grammars: GrammarCompiler | None = None,
        max_string_length: int | None = None,  # for grammars that are compiled here
        restrictions: Restrictions | None = None,  # what the trial of a core in this process found
    ) -> None:
        self.processor = processor
        self.pipeline = pipeline
        self.defaults = defaults
        # The core's limit, so that longer prompts are refused here; `None`: not known yet.
        self.max_model_len: int | None = None
        self.readonly = readonly or pipeline
        self._limits = dict(limit_mm_per_prompt)
        self._mm_processor_kwargs = dict(mm_processor_kwargs or {})
        self._media_io_kwargs = dict(media_io_kwargs or {})
        check_processor_kwargs(processor, self._mm_processor_kwargs)
        for modality in processor.modalities:
            resolve_decode_options(modality, self._media_io_kwargs)
        self._trust_injected = trust_injected
        self._reader = ItemReader(
            processor=processor, specs=ItemSpecs(processor, self._mm_processor_kwargs)
        )
        self._text_length = TextLength(processor.tokenizer)
        self._seeds = random.Random(seed)
        self._grammars = grammars
        self._max_string_length = max_string_length
        self.switched_off = SwitchedOff(restrictions)

    @property
    def allowed_modalities(self) -> tuple[str, ...]:
        """Return the model's modalities that are neither switched off nor limited to 0 items."""
        off = self.switched_off.reasons
        return tuple(
            m for m in self.processor.modalities if self._limits.get(m) != 0 and m not in off
        )

    @contextmanager
    def for_warmup(self) -> Iterator[InputProcessor]:
        """Yield a copy for the warm-up, with its own caches and counters, and no length check."""
        inputs = copy.copy(self)
        inputs.max_model_len = None
        inputs.pipeline, inputs.readonly = self.pipeline.for_warmup(), self.readonly.for_warmup()
        try:
            yield inputs
        finally:
            inputs.pipeline.loader.close()
            inputs.readonly.loader.close()

    def draw_seed(self) -> int:
        """Return a random sampling seed of 63 bits for a request that has none."""
        return self._seeds.getrandbits(63)

    def process(
        self,
        request_id: str,
        prompt: Prompt | EnginePrompt,
        params: SamplingParams,
        **options: Unpack[ProcessKwargs],
    ) -> ProcessedRequest:
        """Do what `process_pausing` does, and block while media is fetched."""
        return run_through(self.process_pausing(request_id, prompt, params, **options))

    def process_pausing(
        self,
        request_id: str,
        prompt: Prompt | EnginePrompt,
        params: SamplingParams,
        *,
        seed: int | None = None,
        skip_mm_cache: bool = False,
        needs_tensors: bool = True,
        cancelled: Future[None] | None = None,
    ) -> Pausing[ProcessedRequest]:
        """Turn a prompt into a request for the core, and pause while its media is fetched.

        Raise a `RequestError` with the path of the field that is wrong. With `skip_mm_cache` and
        without `needs_tensors` the prompt is not run, only its tokens are counted. Its text may
        then be as long as several contexts.
        """
        self._check_grammar(params)
        read = read_prompt(prompt, max_model_len=self.max_model_len)
        pipeline = self._get_pipeline(skip_mm_cache=skip_mm_cache)
        needs_tensors = needs_tensors or not skip_mm_cache
        if read.text is not None:  # before its media is fetched
            self.check_text(read.text, is_counted_only=not needs_tensors)
        token_ids, features, items = yield from self._expand(
            read, pipeline, needs_tensors=needs_tensors, cancelled=cancelled
        )
        streaming = self.processor.streaming_audio
        try:
            if needs_tensors and self.max_model_len is not None:
                check_length(len(token_ids), self.max_model_len)
            request = EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=tuple(token_ids),
                sampling_params=params.resolve(
                    self.defaults, seed=self.draw_seed() if seed is None else seed
                ),
                mm_features=tuple(features),
                eos_token_ids=self.defaults.eos_token_ids,
                bans=self._make_bans(params),
                cache_salt=read.cache_salt,
                priority=read.priority,
                stream=None if streaming is None else streaming.describe_whole(features),
            )
        except BaseException:
            pipeline.release(items)
            raise
        return ProcessedRequest(
            request=request,
            items=tuple(items),
            prompt=read.text,
            is_readonly=pipeline is not self.pipeline,
        )

    def outline_pausing(
        self,
        prompt: Prompt | EnginePrompt,
        params: SamplingParams,
        *,
        cancelled: Future[None] | None = None,
    ) -> Pausing[Outline]:
        """Prepare a prompt for an engine elsewhere: fetch and name its media, and decode nothing.

        If the headers of all media tell their layouts, the prompt is also expanded and tokenised.
        Raise a `RequestError` with the path of the field that is wrong.
        """
        self._check_grammar(params)
        read = read_prompt(prompt, max_model_len=self.max_model_len)
        if read.text is not None:
            self.check_text(read.text)
        if read.rendered is not None:
            return Outline(prompt=read, params=params)
        self._check_counts([item.modality for item in read.media])
        items = yield from self.readonly.outline_pausing(
            read.media, self._get_options(read), cancelled=cancelled
        )
        loaded = replace(read, media=tuple(item.item for item in items))
        if any(item.layout is None for item in items):
            return Outline(prompt=loaded, params=params, items=tuple(items), text=read.text)
        token_ids, features = self._place(read, items, is_counted_only=False)
        if self.max_model_len is not None:
            check_length(len(token_ids), self.max_model_len)
        positions = tuple((each.modality, each.mm_position) for each in features)
        expanded = replace(loaded, text=None, token_ids=token_ids, positions=positions)
        return Outline(prompt=expanded, params=params, items=tuple(items), text=read.text)

    def check_text(self, text: str, *, is_counted_only: bool = False) -> None:
        """Raise a `RequestError` if an untokenised text is too long for the model's context."""
        max_tokens = self.get_max_tokens(is_counted_only=is_counted_only)
        if max_tokens is not None:
            self._text_length.check(text, max_tokens)

    def get_max_tokens(self, *, is_counted_only: bool) -> int | None:
        """Return how many tokens a prompt may have, or `None` if the context's length is not known.

        With `is_counted_only` the prompt is never run and may be several contexts long.
        """
        if self.max_model_len is None:
            return None
        # A prompt that is run leaves room for one new token.
        return _COUNTED_CONTEXTS * self.max_model_len if is_counted_only else self.max_model_len - 1

    def _check_grammar(self, params: SamplingParams) -> None:
        if params.structured_outputs is None:
            return
        if self._grammars is None:
            self._grammars = GrammarCompiler(
                lambda: self.processor.tokenizer,
                eos_token_ids=self.defaults.eos_token_ids,
                max_string_length=self._max_string_length,
            )
        self._grammars.compile(params.structured_outputs)

    def release(self, processed: ProcessedRequest) -> None:
        """Release the handles in a processed request, once, so that its media may be evicted."""
        pipeline = self._get_pipeline(skip_mm_cache=processed.is_readonly)
        pipeline.release(processed.items)

    def _get_pipeline(self, *, skip_mm_cache: bool) -> MediaPipeline:
        return self.readonly if skip_mm_cache else self.pipeline

    def _expand(
        self,
        prompt: EnginePrompt,
        pipeline: MediaPipeline,
        *,
        needs_tensors: bool,
        cancelled: Future[None] | None,
    ) -> Pausing[_Expanded]:
        if prompt.rendered is not None:
            return self._expand_rendered(prompt, prompt.rendered, pipeline)
        self._check_counts([item.modality for item in prompt.media])
        items = yield from pipeline.process_pausing(
            prompt.media,
            self._get_options(prompt),
            needs_tensors=needs_tensors,
            cancelled=cancelled,
        )
        try:
            token_ids, features = self._place(
                prompt, [item.handle for item in items], is_counted_only=not needs_tensors
            )
        except BaseException:
            pipeline.release(items)
            raise
        return token_ids, features, items

    def _place(
        self, prompt: EnginePrompt, items: Sequence[LaidOutItem], *, is_counted_only: bool
    ) -> ExpandedPrompt:
        """Return the token ids of a prompt with placeholders for media, and the media's places."""
        if prompt.positions is not None:
            return list(prompt.token_ids), place_items(items, prompt.positions)
        if prompt.text is not None:
            return expand_text(
                self.processor,
                prompt.text,
                items,
                add_special_tokens=prompt.add_special_tokens,
                check_length=partial(self.check_text, is_counted_only=is_counted_only),
            )
        return expand_token_ids(
            self.processor,
            prompt.token_ids,
            items,
            max_tokens=self.get_max_tokens(is_counted_only=is_counted_only),
        )

    def _expand_rendered(
        self, prompt: EnginePrompt, rendered: RenderedMedia, pipeline: MediaPipeline
    ) -> _Expanded:
        entries = read_items(rendered, prompt.token_ids, self._reader)
        self._check_counts([entry.feature.modality for entry in entries])
        if rendered.is_external and not self._trust_injected:
            entries = rename_items(
                entries,
                hasher=pipeline.hasher,
                bindings=pipeline.uuids,
                scope=UuidScope(client=prompt.uuid_scope, cache_salt=prompt.cache_salt),
            )
        items: list[CachedItem] = []
        try:
            take_items(pipeline.cache, entries, items)
        except BaseException:
            pipeline.release(items)
            raise
        return list(prompt.token_ids), [entry.feature for entry in entries], items

    def _get_options(self, prompt: EnginePrompt) -> ProcessingOptions:
        own = prompt.mm_processor_kwargs
        check_processor_kwargs(self.processor, own)
        media_io_kwargs = dict(self._media_io_kwargs)
        for modality, options in prompt.media_io_kwargs.items():
            if not isinstance(options, Mapping):
                raise RequestError("must be an object", path=("media_io_kwargs", str(modality)))
            media_io_kwargs[modality] = {**media_io_kwargs.get(modality, {}), **options}
        processor_kwargs = {**self._mm_processor_kwargs, **own}
        for modality in {item.modality for item in prompt.media if item.is_encoded}:
            # Checked before the items, so that an error names the options and not an item.
            resolve_options(modality, processor_kwargs, media_io_kwargs)
        return ProcessingOptions(
            processor_kwargs=processor_kwargs,
            media_io_kwargs=media_io_kwargs,
            cache_salt=prompt.cache_salt,
            uuid_scope=prompt.uuid_scope,
        )

    def inject_into_mm_cache(
        self,
        mm_hashes: Mapping[str, Sequence[str]],
        mm_kwargs: Mapping[str, Sequence[MultiModalKwargsItem | None]],
        mm_layouts: Mapping[str, Sequence[Any]] | None = None,
    ) -> dict[str, list[Payload | None]]:
        """Put media items that another process has processed into the cache, under their hashes.

        The arguments map a modality to a list with one entry per item: hashes, tensors and layouts.
        An item without a layout serves only prompts with token ids that already have its
        placeholders. Return the same lists with what the cache has now: the tensors, a reference to
        shared memory, or `None` for an item that was not stored. Items that are `None` are skipped,
        and so are modalities with lists of unequal length. Any other mistake is logged as a warning
        and never raised. Tensors are not copied: the caller must not change them.
        """
        stored: dict[str, list[Payload | None]] = {}
        try:
            for modality, hashes in mm_hashes.items():
                items = mm_kwargs.get(modality) or ()
                layouts = (mm_layouts or {}).get(modality) or [None] * len(hashes)
                if isinstance(hashes, str):
                    raise RequestError(f"mm_hashes of {modality} must be a list")
                if len(hashes) == len(items) == len(layouts):
                    rows = zip(hashes, items, layouts, strict=True)
                    stored[modality] = [self._inject(modality, *row) for row in rows]
        except Exception:  # a failure of this cache must not stop a frontend
            logger.warning("media items could not be put into the processor cache", exc_info=True)
        return stored

    def _inject(self, modality: str, mm_hash: str, kwargs: Any, layout: Any) -> Payload | None:
        """Cache an item, and return its tensors or reference, or `None` if it was not stored."""
        if kwargs is None:
            return None
        try:
            item = self._reader.read_item(modality, mm_hash, kwargs, layout)
            handle = self.pipeline.cache.get_and_update_item(mm_hash, item, needs_layout=False)
            if handle is None:
                return None
            self.pipeline.cache.release([handle])
            return handle.reference or handle.kwargs or item.kwargs
        except Exception:  # a single bad item must not stop the others
            logger.warning("a media item could not be put into the processor cache", exc_info=True)
            return None

    def _make_bans(self, params: SamplingParams) -> TokenBans:
        """Return the tokens that the model or a transcript bans, with the caller's `bad_words`."""
        bans = None if params.speech is None else params.speech.bans
        bans = self.defaults.bans if bans is None else bans
        return bans.add(self._get_bad_sequences(params.bad_words))

    def _get_bad_sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each forbidden word, at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                encoded = self.processor.tokenizer(text, add_special_tokens=False)
                if not encoded["input_ids"]:
                    raise RequestError(
                        f"the tokenizer has no tokens for {word!r}", path=("bad_words",)
                    )
                found[tuple(encoded["input_ids"])] = None
        return tuple(found)

    def _check_counts(self, modalities: Sequence[str]) -> None:
        for modality in dict.fromkeys(modalities):
            count = modalities.count(modality)
            self.switched_off.check(modality, count)
            if modality not in self.processor.modalities:
                takes = ", ".join(self.processor.modalities) or "text only"
                raise RequestError(f"this model takes no {modality} (it takes: {takes})")
            limit = self._limits.get(modality)
            if limit is not None and count > limit:
                raise RequestError(
                    f"there are {count} {modality} items, but limit_mm_per_prompt allows {limit}"
                )
