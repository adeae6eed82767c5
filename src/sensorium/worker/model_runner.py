"""Carries out a `SchedulerOutput`: encode, gather, run the decoder, sample. It schedules nothing.

Owns all tensors of the engine except those of media items, which the core puts into `payloads`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from sensorium.grammar.compiler import GrammarCompiler
from sensorium.layers.attention.backend import PagedAttention
from sensorium.layers.attention.cross import CrossTables, attend_cross
from sensorium.layers.attention.torch_backend import use_ready_kernels
from sensorium.models.hf_model import HfModel
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalKwargsItem
from sensorium.types.request import EngineCoreRequest
from sensorium.types.scheduling import (
    KVCacheGroup,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    StepMode,
    find_cross_group,
)
from sensorium.utils.arrays import StagingBuffer, to_device
from sensorium.worker.alignment import NOTHING_FOUND, Aligner, StepResults
from sensorium.worker.encoder_runner import (
    Encoded,
    EncoderCache,
    EncoderJob,
    EncoderRunner,
)
from sensorium.worker.grammar_masks import GrammarMasks, StepMasks
from sensorium.worker.graphs.building import NO_GRAPHS, Graphs
from sensorium.worker.input_batch import (
    InputBatch,
    Row,
    StepInputs,
    get_gather_slices,
    get_partial_blocks,
)
from sensorium.worker.kv_cache import KVCache
from sensorium.worker.prompt_scorer import NO_SCORES, PromptScorer, PromptScores
from sensorium.worker.request_states import PromptPositions, RequestState, RequestTable
from sensorium.worker.sampling.sampler import Sampler, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The tokens that a step chooses, which may not be computed yet."""

    states: Sequence[RequestState]
    sampling: Sampling  # a row for each state
    masks: StepMasks


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step that the device computes, until `ModelRunner.finish` waits for its results."""

    encoded: Encoded
    failed_requests: Mapping[str, RequestError]  # requests that were left out
    mode: StepMode | None = None
    scores: PromptScores = NO_SCORES
    results: StepResults = NOTHING_FOUND
    choice: _Choice | None = None


class ModelRunner:
    """A runner that computes the steps of an engine on its device, as the scheduler plans them."""

    def __init__(
        self,
        hf_model: HfModel,
        *,
        kv_cache: KVCache,
        groups: Sequence[KVCacheGroup],
        block_size: int,
        attention: PagedAttention,
        payloads: Mapping[str, MultiModalKwargsItem],  # `mm_hash` -> processed tensors
        grammars: GrammarCompiler | None = None,  # None: structured outputs are refused
        graphs: Graphs = NO_GRAPHS,
    ) -> None:
        self.encoder_cache = EncoderCache()
        self._hf_model = hf_model
        self._kv_cache = kv_cache
        self._num_groups = len(groups)
        # The group of layers with cross-attention, if there is one, and what they need in a step.
        self._cross_group = find_cross_group(groups)
        self._cross: CrossTables | None = None
        self._table = RequestTable(len(groups), self._cross_group)
        self._block_size = block_size
        self._graphs = graphs
        self._attention = attention
        self._payloads = payloads
        self._states: dict[str, RequestState] = {}
        self._mrope: dict[str, PromptPositions] = {}  # by request id
        self._failed_before: Mapping[str, str] = {}  # the failed encoder keys of the last step
        # The tokens of the last step that chose any. The host may not have read them yet.
        self._unread: torch.Tensor | None = None
        encode = None if graphs.encoders is None else graphs.encoders.encode
        self.encoder_runner = EncoderRunner(hf_model, self.encoder_cache, encode)
        self._input_batch = InputBatch(
            groups=groups,
            block_size=block_size,
            bidirectional_modalities=hf_model.bidirectional_modalities,
            has_causal_full_layers=hf_model.has_causal_full_layers,
            has_long_factors=hf_model.long_after is not None,
            has_mrope=hf_model.has_mrope,
            table=self._table,
            encoder_cache=self.encoder_cache,
            staging=StagingBuffer(device=hf_model.device),
        )
        self._sampler = Sampler(device=hf_model.device)
        self._prompt_scorer = PromptScorer(hf_model)
        self._aligner = Aligner(hf_model)
        self._grammars = GrammarMasks(grammars)

    @property
    def num_encoder_bytes(self) -> int:
        return self.encoder_cache.num_bytes

    # ---- requests come and go

    def add_request(self, request: EngineCoreRequest) -> None:
        """Prepare a new request, or raise `RequestError` if it does not fit the model.

        Its grammar begins to compile, and its M-RoPE positions are kept until it ends.
        """
        self._check_token_ids(request)
        self._grammars.add(request)
        if not self._hf_model.has_mrope:
            return
        items = [self._payloads[feature.mm_hash] for feature in request.mm_features]
        try:
            positions, delta = self._hf_model.get_mrope_positions(
                request.prompt_token_ids, request.mm_features, items
            )
        except Exception as error:  # models raise all kinds of errors: fail this request alone
            raise RequestError(
                f"the model gives no positions for the media of this prompt: {error!r}"
            ) from error
        self._mrope[request.request_id] = PromptPositions(
            positions=positions.numpy(), delta=np.asarray(delta)
        )

    def _check_token_ids(self, request: EngineCoreRequest) -> None:
        """Raise `RequestError` if a token id of the request is outside the model's vocabulary."""
        token_ids = np.array(request.prompt_token_ids)
        # Placeholders may be outside, because their embeddings come from encoders. With
        # cross-attention, and in a stream, no token of the prompt stands for media.
        is_outside_prompt = self._cross_group is not None or request.stream is not None
        for feature in () if is_outside_prompt else request.mm_features:
            for start, end in feature.mm_position.extract_embeds_range():
                token_ids[start:end] = 0
        most = int(token_ids.max(initial=0))
        if most >= self._hf_model.vocab_size:
            raise RequestError(
                f"token id {most} is outside the model's vocabulary of {self._hf_model.vocab_size}",
                path=("prompt",),
            )
        params = request.sampling_params
        self._check_named_ids("logit_bias", params.logit_bias)
        self._check_named_ids("allowed_token_ids", params.allowed_token_ids or ())

    def _check_named_ids(self, name: str, token_ids: Iterable[int]) -> None:
        vocab_size = self._hf_model.vocab_size
        if outside := sorted(token_id for token_id in token_ids if token_id >= vocab_size):
            raise RequestError(
                f"has token ids outside the model's vocabulary of {vocab_size}: "
                f"{', '.join(map(str, outside[:8]))}{', …' if len(outside) > 8 else ''}",
                path=(name,),
            )

    def forget_request(self, request_id: str) -> None:
        """Release the grammar and the positions of a request that has ended."""
        self._mrope.pop(request_id, None)
        self._grammars.forget(request_id)

    # ---- one step

    @torch.inference_mode()
    @use_ready_kernels()
    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start to compute a planned step, and return without waiting for its tokens.

        On a GPU the host waits only for encoders. So it can plan and launch the next step before it
        calls `finish` for this one. Tokens that are not read yet are passed from one step to the
        next on the device. Steps must be finished in the order in which they were launched.
        """
        self._apply_changes(output)
        before, self._failed_before = self._failed_before, {}
        encoded = self.encoder_runner.run(self._get_encoder_jobs(output.scheduled))
        self._failed_before = encoded.failed
        left_out = self._get_left_out(output.scheduled, {**before, **encoded.failed})
        rows = [
            (entry, self._states[entry.request_id])
            for entry in output.scheduled
            if entry.request_id not in left_out
        ]
        step = LaunchedStep(encoded=encoded, failed_requests=left_out)
        return self._run(rows, step) if rows else step

    def is_done_within(self, seconds: float, step: LaunchedStep) -> bool:
        """Wait for the tokens of a step for a short time, and return whether they are there.

        On a CPU, and for a step that chooses no tokens, it returns False at once.
        """
        return step.choice is not None and step.choice.sampling.arrives_within(seconds)

    def finish(self, step: LaunchedStep) -> ModelRunnerOutput:
        """Wait until the device has computed a step, and return the results."""
        output = ModelRunnerOutput(
            token_ids={},
            logprobs={},
            failed_encodes=step.encoded.failed,
            loaded_encodes=step.encoded.loaded,
            failed_requests=step.failed_requests,
            prompt_logprobs=step.scores.read(),
            results=step.results.read(),
            encode_s=step.encoded.seconds,
            mode=step.mode,
        )
        return output if step.choice is None else self._take_choice(step.choice, output)

    def _apply_changes(self, output: SchedulerOutput) -> None:
        for key in output.freed_encoder_keys:
            self.encoder_cache.drop(key)
        for request_id in output.stopped_request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                state.release()
        for started in output.started:
            request = started.request
            self._states[request.request_id] = RequestState(
                request,
                started.output_token_ids,
                table=self._table,
                mrope=self._mrope.get(request.request_id),
                is_long=started.is_long,
                has_media=started.has_media,
            )
            self._grammars.start(request, started.output_token_ids)
        for scheduled in output.scheduled:
            if scheduled.new_block_ids:
                self._states[scheduled.request_id].add_blocks(scheduled.new_block_ids)

    def _get_encoder_jobs(self, scheduled: Sequence[ScheduledRequest]) -> list[EncoderJob]:
        jobs = []
        for entry in scheduled:
            if not entry.encoder_inputs:
                continue
            features = self._states[entry.request_id].request.mm_features
            for encoder_input in entry.encoder_inputs:
                feature = features[encoder_input.mm_index]
                item = self._payloads[feature.mm_hash]
                jobs.append(EncoderJob(key=encoder_input.key, feature=feature, item=item))
        return jobs

    def _get_left_out(
        self, scheduled: Sequence[ScheduledRequest], failed: Mapping[str, str]
    ) -> dict[str, RequestError]:
        """Return the requests that can't run in this step, and the error of each by request id.

        They need media embeddings that failed in this step or the one before (`failed` has the
        reasons by encoder key), or that are more or fewer than their placeholder tokens.
        """
        left_out: dict[str, RequestError] = {}
        for entry in scheduled:
            state = self._states[entry.request_id]
            if entry.num_computed_tokens < state.num_prompt_tokens:
                reason = self._find_missing(entry, state, failed)
                state.failure = state.failure or (RequestError(reason) if reason else None)
            if state.failure is not None:
                left_out[entry.request_id] = state.failure
        return left_out

    def _find_missing(
        self, entry: ScheduledRequest, state: RequestState, failed: Mapping[str, str]
    ) -> str | None:
        """Return why a request lacks media embeddings that it needs in this step, or `None`."""
        for mm_index in self._get_needed_items(entry, state):
            key = state.get_encoder_key(mm_index)
            reason = None if key in self.encoder_cache else failed.get(key)
            reason = reason or self._find_misfit(state, mm_index)
            if reason is not None:
                return reason
        return None

    def _get_needed_items(self, entry: ScheduledRequest, state: RequestState) -> Iterable[int]:
        """Return the media items with embeddings that a request needs in a step."""
        start, features = entry.num_computed_tokens, state.request.mm_features
        if self._cross_group is not None:
            return range(len(features)) if state.stores_media(start) else ()
        parts = get_gather_slices(features, start, start + entry.num_new_tokens)
        return [part.mm_index for part in parts]

    def _find_misfit(self, state: RequestState, mm_index: int) -> str | None:
        """Return why cached embeddings do not fit a media item, or `None` if they fit.

        A hash that a client chose may have stood for another item when it was cached.
        """
        feature = state.request.mm_features[mm_index]
        num_there = len(self.encoder_cache[state.get_encoder_key(mm_index)])
        num_embeds = feature.mm_position.get_num_embeds()
        if num_there == num_embeds:
            return None
        return (
            f"the {feature.modality} of this hash has {num_there} embeddings, but its placeholder "
            f"has room for {num_embeds}: a hash must always stand for the same media item"
        )

    def _run(self, rows: Sequence[Row], step: LaunchedStep) -> LaunchedStep:
        """Compute a step for the scheduled requests, with a CUDA graph if one fits."""
        graphs = self._graphs.decoding
        size = None if graphs is None else graphs.find_size(rows)
        if graphs is None or size is None:
            return self._run_batch(self._input_batch.prepare(rows, self._unread), step)
        partial = (get_partial_blocks(rows, i, self._block_size) for i in range(self._num_groups))
        self._clear_blocks(map(torch.from_numpy, partial))
        audios = self._input_batch.take_audios(rows)
        result = graphs.replay(rows, size, self._table, self._unread, audios)
        choice = self._choose([state for _, state in rows], result.logits, result.likeliest)
        return replace(step, mode=StepMode.DECODE_GRAPH, choice=choice)

    def _run_batch(self, inputs: StepInputs, step: LaunchedStep) -> LaunchedStep:
        if self._cross_group is not None:
            self._aligner.begin(inputs.rows)
        hidden, mode = self._forward(inputs)
        scores = self._prompt_scorer.score(hidden, inputs.rows)
        if self._cross_group is not None:
            step = replace(step, results=self._aligner.finish(hidden))
        if not inputs.sampled:
            return replace(step, scores=scores, mode=mode)
        logits = self._hf_model.logits(hidden.index_select(0, inputs.logits_index))
        return replace(step, scores=scores, mode=mode, choice=self._choose(inputs.sampled, logits))

    def _choose(
        self,
        states: Sequence[RequestState],
        logits: torch.Tensor,  # a row for each state
        likeliest: torch.Tensor | None = None,  # by `mark_likeliest`, if a graph has computed it
    ) -> _Choice:
        """Begin to choose the next token of each request; a request with a late mask gets none."""
        masks = self._grammars.take(states)
        rows = [
            state.get_sampling_row(masks.masks.get(state.request.request_id)) for state in states
        ]
        sampling = self._sampler.sample(logits, rows, likeliest)
        self._unread = sampling.token_ids
        for row, state in enumerate(states):
            state.note_unread(row)
        return _Choice(states=states, sampling=sampling, masks=masks)

    def _take_choice(self, choice: _Choice, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Append the chosen tokens to the states of their requests, and add them to an output."""
        states, masks = choice.states, choice.masks
        sampled = choice.sampling.read()
        chosen = {}
        for state, token_id in zip(states, sampled.token_ids, strict=True):
            state.num_unread_tokens -= 1
            if token_id is not None and not masks.is_without(state.request.request_id):
                state.append_token(token_id)
                chosen[state] = token_id
        progress = self._grammars.consume(chosen.items())
        names = [state.request.request_id for state in states]
        failures = {names[row]: RequestError(reason) for row, reason in sampled.failures.items()}
        logprobs = zip(names, sampled.logprobs, strict=False)
        return replace(
            output,
            token_ids={state.request.request_id: (chosen[state],) for state in chosen},
            logprobs={name: (entry,) for name, entry in logprobs if entry is not None},
            failed_requests={
                **output.failed_requests,
                **failures,
                **masks.failures,
                **progress.failures,
            },
            late_request_ids=masks.late_ids - failures.keys(),
            completed_request_ids=progress.completed_ids,
        )

    def _clear_blocks(self, block_ids_by_group: Iterable[torch.Tensor]) -> None:
        for group_index, block_ids in enumerate(block_ids_by_group):
            if len(block_ids):
                on_device = to_device(block_ids, self._hf_model.device)
                self._kv_cache.clear_blocks(group_index, on_device)

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, StepMode]:
        """Return the hidden states [N, width] of a step, and the mode in which it was computed."""
        self._clear_blocks(inputs.partial_blocks)
        self._cross = inputs.cross
        self._attention.prepare(inputs.layout)
        embeds, extra = self._hf_model.embed(inputs.input_ids, inputs.mm_index, inputs.mm_embeds)
        extra |= self._hf_model.make_conditions(inputs.delays)
        segments = self._graphs.segments
        size: int | StepMode = StepMode.EAGER_NO_GRAPHS
        if inputs.layout.attend_until is not None:
            size = StepMode.EAGER_SPANS
        elif segments is not None:
            size = segments.find_size(embeds.shape[1], extra)
        if segments is None or isinstance(size, StepMode):
            with self._hf_model.choosing_factors(inputs.is_long):
                hidden = self._hf_model.forward(embeds, inputs.positions, self, extra)
            return hidden, StepMode(size)
        hidden = segments.replay(
            size,
            embeds,
            inputs.positions,
            extra,
            is_long=inputs.is_long,
            slots=[group.slot_mapping for group in inputs.layout.groups],
            attend=self._attend_stored,
        )
        return hidden, StepMode.SEGMENT_GRAPHS

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store the new keys and values of a decoder layer, and return its attention output.

        The layer calls this through `models.seams`. A layer that shares the keys and values of
        another layer stores none.
        """
        cache = self._kv_cache[layer_index]
        if cache.group_index == self._cross_group and self._cross is not None:
            return attend_cross(
                cache,
                self._cross,
                query,
                key,
                value,
                scaling=scaling,
                observed=self._aligner.get_observed(layer_index),
                observe=partial(self._aligner.observe, layer_index, scaling),
            )
        return self._attention.attend(cache, query, key, value, scaling=scaling)

    def _attend_stored(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
    ) -> torch.Tensor:
        """Return the attention output of a layer with keys and values that a graph has stored."""
        cache = self._kv_cache.get_stored(layer_index)
        return self._attention.attend(cache, query, key, value, scaling=scaling)
