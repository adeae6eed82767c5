"""Compares the engine with a model's own code, before a model of an unknown family is served.

A family is an architecture. The generic `HfModel` detects some needs of an unknown one, but not
others: a mask that is neither causal nor a window, or a further input that the decoder gets with a
picture. Such a model would run and give wrong tokens. Families with code of their own need no
trial: tests compare them.

There is one trial of text, and then one for each modality. A trial has two prompts of different
lengths, one of them with two items. They run together and in chunks, and each gets an answer of
several tokens. Then they run again, with the encoder cache and with the prefix cache. Every
log-probability of prompts and answers is compared. If that fails, the trial is repeated with one
item in each prompt; if that succeeds, the modality is limited to one item a prompt.

Rounding in another order changes numbers slightly. How much depends on the model and its dtype, so
it is measured: the model runs without the engine, once with its own attention and once with other
rounding. The engine may differ from the model by a small multiple of that distance.

A trial has a scheduler of its own, so that the engine's counters and caches do not change. At the
end the worker drops everything that it keeps of the trial.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sensorium.core.scheduler import Scheduler
from sensorium.engine.assembly.config import EngineConfig, make_scheduler
from sensorium.engine.assembly.distance import (
    Distance,
    TrialAnswer,
    collect_logprobs,
    find_fault,
)
from sensorium.engine.core_process.engine_core import EngineCore
from sensorium.engine.inputs.input_processor import InputProcessor, ProcessedRequest
from sensorium.models.hf_model import HfModel
from sensorium.models.loading import find_unserved
from sensorium.models.media_batches import collate
from sensorium.models.whole_model import WholeModel
from sensorium.multimodal.pipeline import MediaPipeline
from sensorium.multimodal.processing.dummy_media import make_dummy_media
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import InvariantError, ModelError
from sensorium.types.multimodal import MultiModalKwargsItem, Transfer
from sensorium.types.request import EngineCoreRequest, Prompt
from sensorium.types.restrictions import Restrictions
from sensorium.types.sampling import MAX_LOGPROBS, GenerationDefaults, SamplingParams, TokenBans

logger = logging.getLogger(__name__)
_WORDS = (
    "Look and listen, then say in a few words what this is. ",
    " Compare it with the next one: which of them came first, and why? ",
    " Now answer, and name what you are not sure about.",
)
_NUM_TOKENS = 5  # the length of each answer
_MAX_TEXT_TOKENS = 640  # the most for the longer text, which should exceed the model's windows
_NUM_CHUNKS = 3  # the longer prompt takes at least this many steps
_PARAMS = SamplingParams(
    temperature=0.0,
    max_tokens=_NUM_TOKENS,
    logprobs=MAX_LOGPROBS,
    prompt_logprobs=MAX_LOGPROBS,
    ignore_eos=True,
)


class TrialRun:
    """A scheduler for a trial, which runs requests on the engine's worker."""

    def __init__(self, core: EngineCore, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._core = EngineCore(scheduler, core.runner, core.payloads)

    def ask(self, requests: Sequence[tuple[EngineCoreRequest, Transfer]]) -> list[TrialAnswer]:
        """Run requests together to their ends, and return their answers in the same order."""
        answers = {request.request_id: TrialAnswer() for request, _ in requests}
        for request, transfer in requests:
            self._core.add_request(request, transfer)
        while self._core.has_requests:
            for output in self._core.step():
                answers[output.request_id].add(output)
        return list(answers.values())

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, but not the encoder cache."""
        self._scheduler.kv_cache.clear_cache()

    def close(self) -> None:
        """Abort all requests, and make the worker drop everything that it keeps of this trial."""
        self._core.abort_requests(list(self._scheduler.requests))
        self._scheduler.encoder_cache.clear_cache()
        self._core.step()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One prompt of a trial, as a request for the engine and as inputs for the model itself."""

    request: EngineCoreRequest
    transfer: Transfer
    whole: Mapping[str, torch.Tensor]  # the inputs that the model's processor makes of the prompt

    def make_again(self) -> tuple[EngineCoreRequest, Transfer]:
        """Return a request that may use the prefix cache: without prompt log-probabilities."""
        params = replace(self.request.sampling_params, prompt_logprobs=None)
        return replace(self.request, sampling_params=params), self.transfer


class Trial:
    """A comparison of the engine with the model's own Transformers code.

    `pipeline` must not send media to a core, so that the items come with their tensors. No prompt
    has more items of a modality than `limit_mm_per_prompt` allows.
    """

    def __init__(
        self,
        core: EngineCore,
        hf_model: HfModel,
        processor: MultiModalProcessor,
        pipeline: MediaPipeline,
        *,
        config: EngineConfig,
        limit_mm_per_prompt: Mapping[str, int],
    ) -> None:
        self._core = core
        self._hf_model = hf_model
        self._processor = processor
        self._config = config
        self._limits = limit_mm_per_prompt
        # A model with random weights may generate the token that stands for an item. Models treat
        # that token in different ways if there is no item, and no real model generates it.
        placeholders = [i for m in processor.modalities for i in processor.get_token_ids(m)]
        bans = TokenBans(sequences=tuple((token_id,) for token_id in dict.fromkeys(placeholders)))
        self._inputs = InputProcessor(
            processor,
            pipeline=pipeline,
            defaults=GenerationDefaults(bans=bans),
            limit_mm_per_prompt={},
            seed=0,
        )
        self._whole = WholeModel(hf_model)

    def run(self) -> Restrictions:
        """Compare text and then each modality; raise a `ModelError` if even text can't be used."""
        fault = self._try(None)
        model_class = type(self._hf_model.model)
        if fault is not None:
            raise ModelError(f"{model_class.__name__} can't be run: {fault}")
        switched_off = find_unserved(model_class, self._processor.modalities)
        only_one = {}
        for modality in self._processor.modalities:
            most = min(2, self._limits.get(modality, 2))
            faults = self._try_modality(modality, most)
            if len(faults) == most > 0:
                switched_off[modality] = faults[-1]
            elif faults:
                only_one[modality] = faults[0]
        allowed = {m: reason for m, reason in switched_off.items() if self._limits.get(m) != 0}
        return Restrictions(switched_off=allowed, only_one=only_one)

    def _try_modality(self, modality: str, most: int) -> list[str]:
        """Return the faults with `most` items, then with fewer, until engine and model agree."""
        faults = []
        for num_items in range(most, 0, -1):
            fault = self._try(modality, num_items)
            if fault is None:
                break
            faults.append(fault)
        return faults

    def _try(self, modality: str | None, num_items: int = 0) -> str | None:
        """Return what a trial finds wrong, or `None`; without a `modality` the prompts are text."""
        one = "one " if num_items == 1 else ""
        subject = "text" if modality is None else f"text with {one}{modality}"
        started = time.monotonic()
        try:
            ours, rounding = self._compare(modality, num_items)
        except Exception as error:  # an unknown model may raise anything
            logger.debug("the trial of %s failed", subject, exc_info=True)
            return f"a trial of {subject} failed: {str(error) or type(error).__name__}"
        logger.info(
            "trial of %s: log-probabilities differ by %.2g, and by %.2g at the worst position "
            "(rounding alone: %.2g and %.2g); %.2f s",
            *(subject, ours.overall, ours.worst, rounding.overall, rounding.worst),
            time.monotonic() - started,
        )
        fault = find_fault(ours, rounding, self._hf_model.dtype)
        return None if fault is None else f"in a trial of {subject} {fault}"

    # ---- the prompts

    def _fit_words(self, modality: str | None, media: Sequence[object]) -> list[str]:
        """Return the sentences of prompts with these items, cut if the context is very small."""
        num_tokens = len(self._processor.tokenizer("".join(_WORDS) + _WORDS[-1])["input_ids"])
        max_model_len = self._config.limits.max_model_len
        room = max_model_len - 2 * _NUM_TOKENS
        if media:
            _, processed = self._process("", [""] * (len(media) + 1), modality, media)
            room -= len(processed.request.prompt_token_ids)
            if room <= 0:
                raise ModelError(
                    f"a prompt with {len(media)} small items leaves no room for words in a context "
                    f"of {max_model_len} tokens"
                )
        share = min(1.0, max(0.1, room / num_tokens))
        return [words[: math.ceil(share * len(words))] for words in _WORDS]

    def _make_cases(self, modality: str | None, num_items: int) -> list[_Case]:
        """Return two prompts of different lengths, the shorter one first.

        The engine already generates for the shorter one while it still computes the longer one.
        With a modality, each prompt contains an item of its own. If `num_items` is two, the longer
        prompt also contains the item of the shorter one, at another place.
        """
        if modality is None:
            words = self._fit_words(None, ())
            return [
                self._make_case("0", words[:1]),
                self._make_case("1", self._make_long_text("".join(words))),
            ]
        rate = self._processor.sampling_rate or 0
        first, second = (make_dummy_media(modality, rate, index=index) for index in (0, 1))
        items = [second, first][:num_items]
        words = self._fit_words(modality, items)
        return [
            self._make_case("0", [words[0], words[2]], modality, [first]),
            self._make_case("1", [*words[:num_items], words[2] * 2], modality, items),
        ]

    def _make_long_text(self, text: str) -> list[str]:
        """Repeat a text until it is longer than all attention windows that a prompt can exceed."""
        num_tokens = len(self._processor.tokenizer(text)["input_ids"])
        room = min(_MAX_TEXT_TOKENS, self._config.limits.max_model_len - _NUM_TOKENS)
        windows = [group.window or 0 for group in self._config.groups]
        windows.append(getattr(self._hf_model.text_config, "sliding_window", None) or 0)
        reachable = [window for window in windows if window + 2 * num_tokens <= room]
        return [text] * (1 + math.ceil(max(reachable, default=0) / num_tokens))

    def _process(
        self, request_id: str, texts: Sequence[str], modality: str | None, media: Sequence[object]
    ) -> tuple[str, ProcessedRequest]:
        """Return the prompt with these texts and the media items between them, and its request."""
        text = self._processor.make_trial_text(modality, texts)
        prompt: Prompt = {"prompt": text}
        if modality is not None:
            prompt = {"prompt": text, "multi_modal_data": {modality: list(media)}}
        processed = self._inputs.process(request_id, prompt, _PARAMS)
        self._inputs.release(processed)
        return text, processed

    def _make_case(
        self,
        request_id: str,
        texts: Sequence[str],
        modality: str | None = None,
        media: Sequence[object] = (),
    ) -> _Case:
        text, processed = self._process(request_id, texts, modality, media)
        tensors = {item.handle.mm_hash: item.handle.kwargs or {} for item in processed.items}
        request = processed.request
        try:
            whole = self._processor.call_whole(text, modality, media)
        except Exception:  # some processors take only one item, although the model takes more
            items = [tensors[feature.mm_hash] for feature in request.mm_features]
            # Only the processor could pad items of different shapes to one length.
            if len(media) < 2 or not _can_be_joined(items):
                raise
            whole = {"input_ids": torch.tensor([list(request.prompt_token_ids)]), **collate(items)}
        if whole["input_ids"][0].tolist() != list(request.prompt_token_ids):
            raise ModelError(_explain_prompt(modality, len(media)))
        return _Case(request=request, transfer=Transfer(payloads=tensors), whole=whole)

    # ---- the engine

    def _ask(self, cases: Sequence[_Case]) -> list[list[TrialAnswer]]:
        """Run the prompts several times, and return a list of answers for each of them.

        The first answer is computed without caches, the next one (if there is media) with the
        encoder cache, and the last one also with the prefix cache.
        """
        run = TrialRun(self._core, make_scheduler(self._make_config(cases)))
        scored = [(case.request, case.transfer) for case in cases]
        try:
            rounds = [run.ask(scored)]
            if any(case.request.mm_features for case in cases):
                run.forget_prefixes()
                rounds.append(run.ask(scored))
                _check_encoder_hits(cases, rounds[-1], self._config)
            rounds.append(run.ask([case.make_again() for case in cases]))
            _check_prefix_hits(cases, rounds[-1], self._config)
        finally:
            run.close()
        return [list(answers) for answers in zip(*rounds, strict=True)]

    def _make_config(self, cases: Sequence[_Case]) -> EngineConfig:
        """Return a config with prefix caching, and with steps too small for the longer prompt."""
        longest = max(len(case.request.prompt_token_ids) for case in cases)
        budget = min(self._config.limits.max_num_batched_tokens, 1 + longest // _NUM_CHUNKS)
        limits = replace(self._config.limits, max_num_batched_tokens=budget)
        return replace(self._config, limits=limits, enable_prefix_caching=True)

    # ---- the comparison

    def _compare(self, modality: str | None, num_items: int) -> tuple[Distance, Distance]:
        """Return how far the engine is from the model, and how much rounding alone changes."""
        cases = self._make_cases(modality, num_items)
        ours: list[float] = []
        theirs: list[float] = []
        otherwise: list[float] = []
        lengths: list[int] = []
        for case, answers in zip(cases, self._ask(cases), strict=True):
            own, wanted = collect_logprobs(answers)
            output_ids = answers[0].token_ids
            ours += own
            theirs += self._whole.score(case.whole, output_ids, wanted)
            otherwise += self._whole.score_otherwise(case.whole, output_ids, wanted)
            lengths += [len(token_ids) for token_ids in wanted]
        return (
            Distance.measure(ours, theirs, lengths),
            Distance.measure(theirs, otherwise, lengths),
        )


def _check_encoder_hits(
    cases: Sequence[_Case], answers: Sequence[TrialAnswer], config: EngineConfig
) -> None:
    """Raise an `InvariantError` if a repeated run encoded an item although the cache has room."""
    features = {f.mm_hash: f for case in cases for f in case.request.mm_features}.values()
    num_embeds = sum(feature.mm_position.get_num_embeds() for feature in features)
    if num_embeds > config.limits.encoder_cache_size:
        return
    for case, answer in zip(cases, answers, strict=True):
        if answer.num_encoder_hits != len(case.request.mm_features):
            raise InvariantError(
                "an encoder output that was just computed is not in the encoder cache"
            )


def _check_prefix_hits(
    cases: Sequence[_Case], answers: Sequence[TrialAnswer], config: EngineConfig
) -> None:
    """Raise an `InvariantError` if a repeated prompt missed a prefix cache that has room."""
    lengths = [len(case.request.prompt_token_ids) for case in cases]
    num_blocks = sum(math.ceil((n + _NUM_TOKENS) / config.block_size) for n in lengths)
    if any(group.num_blocks <= 2 * num_blocks for group in config.groups):
        return
    for length, answer in zip(lengths, answers, strict=True):
        if length > config.block_size and not answer.num_cached_tokens:
            raise InvariantError("a prompt that was just computed is not in the prefix cache")


def _can_be_joined(items: Sequence[MultiModalKwargsItem]) -> bool:
    """Return whether the tensors of each name differ in their first dimension alone."""
    shapes = [{name: tensor.shape[1:] for name, tensor in item.items()} for item in items]
    return all(shape == shapes[0] for shape in shapes)


def _explain_prompt(modality: str | None, num_items: int) -> str:
    """Return an error text: engine and processor turn a prompt into different token ids."""
    if num_items < 2:
        return "the model's processor turns the prompt into other token ids than this engine"
    return f"the model's processor turns two {modality} items into other token ids than single ones"
