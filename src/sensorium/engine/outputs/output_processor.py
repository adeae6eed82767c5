"""Turns the core's outputs into outputs for callers: text, log-probabilities, counts and reports.

A request is either returned when it has ended, or streamed. The deltas of a streamed request can be
taken at any time, and the last one has the whole request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sensorium.engine.outputs.completions import (
    Completion,
    get_child_ids,
    make_logprobs,
    make_token_text,
)
from sensorium.types.errors import RequestError
from sensorium.types.model_kind import CAUSAL, ModelKind
from sensorium.types.multimodal import ItemTimes, MultiModalFeatureSpec
from sensorium.types.outputs import Logprob, MediaItemReport, RequestDelta, RequestOutput
from sensorium.types.request import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    TensorResult,
    TokenLogprobs,
)


@dataclass(slots=True)
class _RequestState:
    """The state of a request that has not ended, or that still has deltas to be taken."""

    request: EngineCoreRequest
    prompt: str | None  # if text was given
    completions: dict[str, Completion]  # id in the core -> completion, in the order of indices
    is_streamed: bool
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    results: dict[str, TensorResult] = field(default_factory=dict)
    mm_items: tuple[MediaItemReport, ...] = ()
    stages: ItemTimes = field(default_factory=dict)
    sent: float | None = None  # the monotonic time at which it was sent to the core
    final: RequestOutput | None = None


class OutputProcessor:
    """A collector of the core's outputs that turns token ids into text and results for callers.

    Each completion has its own id in the core.
    """

    def __init__(self, tokenizer: Any, *, kind: ModelKind = CAUSAL) -> None:
        self._tokenizer = tokenizer
        self._kind = kind
        self._get_text = make_token_text(tokenizer)
        self._states: dict[str, _RequestState] = {}  # request id -> state, until the request ends
        self._owners: dict[str, _RequestState] = {}  # id in the core -> state, until it ends there
        self._changed: dict[str, _RequestState] = {}  # request id -> state with a delta to take

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, *, is_streamed: bool = False
    ) -> None:
        """Register a request, so that the core's outputs for its completions are collected.

        With `is_streamed`, results are taken with `take_delta`; otherwise `process` returns the
        whole request when it has ended.
        """
        completions = {
            child_id: Completion(request, index, self._tokenizer, self._get_text)
            for index, child_id in enumerate(get_child_ids(request))
        }
        state = _RequestState(request, prompt, completions, is_streamed)
        self._states[request.request_id] = state
        self._owners |= dict.fromkeys(completions, state)

    def add_reports(
        self,
        request_id: str,
        mm_items: tuple[MediaItemReport, ...],
        stages: ItemTimes,
        *,
        sent: float,
    ) -> None:
        """Record how a request's media was prepared, and when the request was sent to the core."""
        state = self._states[request_id]
        state.mm_items, state.stages, state.sent = mm_items, stages, sent

    @property
    def changed_ids(self) -> tuple[str, ...]:
        """Return the ids of the streamed requests that have a delta to be taken."""
        return tuple(self._changed)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Return the ids of the requests that have not ended."""
        return tuple(self._states)

    @property
    def streamed_ids(self) -> tuple[str, ...]:
        """Return the ids of the streamed requests that have not ended."""
        return tuple(key for key, state in self._states.items() if state.is_streamed)

    def has_request(self, request_id: str) -> bool:
        return request_id in self._states

    def get_child_ids(self, request_ids: Iterable[str]) -> list[str]:
        """Return the core's ids of all completions of these requests, without unknown requests."""
        states = (self._states.get(request_id) for request_id in request_ids)
        return [child_id for state in states if state is not None for child_id in state.completions]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Remove requests and their deltas; later outputs of the core for them are ignored."""
        for child_id in self.get_child_ids(request_ids):
            self._owners.pop(child_id, None)
        for request_id in request_ids:
            self._states.pop(request_id, None)
            self._changed.pop(request_id, None)

    def process(self, outputs: Sequence[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Take outputs of the core; return requests that ended, and ids that the core must abort.

        Streamed requests are not returned. The ids are those of completions that reached a stop
        string, or that belong to a request with another completion that failed or was aborted.
        """
        finished: list[RequestOutput] = []
        stopped: list[str] = []
        for output in outputs:
            state = self._owners.get(output.request_id)
            if state is None:
                continue  # it has already ended, at a stop string or with its request
            state.prompt_logprobs.extend(output.prompt_logprobs)
            state.results |= output.results
            completion = state.completions[output.request_id]
            completion.add(output)
            if state.is_streamed:
                self._changed[state.request.request_id] = state
            if completion.last is None:
                continue
            del self._owners[output.request_id]
            if output.finish_reason is None:
                stopped.append(output.request_id)
            rest = [child_id for child_id in state.completions if child_id in self._owners]
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                stopped.extend(rest)
                rest = []
            if not rest:
                finished += self._end(state, error=_make_error(output))
        return finished, stopped

    def fail(self, request_id: str, error: RequestError) -> tuple[list[RequestOutput], list[str]]:
        """Fail a request, if it has not ended, and return the same two lists as `process`."""
        state = self._states.get(request_id)
        if state is None:
            return [], []
        stopped = [child_id for child_id in state.completions if child_id in self._owners]
        for child_id in stopped:
            end = EngineCoreOutput(request_id=child_id, finish_reason=FinishReason.ERROR)
            state.completions[child_id].add(end)
        return self._end(state, error=error), stopped

    def _end(self, state: _RequestState, *, error: RequestError | None) -> list[RequestOutput]:
        """End a request, and return its output in a list, which is empty if it is streamed."""
        self.forget((state.request.request_id,))
        state.final = self._make_output(state, error)
        if not state.is_streamed:
            return [state.final]
        self._changed[state.request.request_id] = state
        return []

    def take_delta(self, request_id: str) -> RequestDelta | None:
        """Return what a streamed request generated since the last call, or `None` if nothing."""
        state = self._changed.pop(request_id, None)
        if state is None:
            return None
        is_last = state.final is not None
        taken = [child.take_delta(is_last=is_last) for child in state.completions.values()]
        deltas = tuple(delta for delta in taken if delta is not None)
        if not deltas and not is_last:
            return None
        return RequestDelta(
            request_id=request_id,
            prompt_token_ids=state.request.prompt_token_ids,
            deltas=deltas,
            final=state.final,
        )

    def take_finals(self, request_ids: Collection[str]) -> list[RequestOutput]:
        """Return the outputs of these streamed requests that ended; drop the deltas of all."""
        changed = [request_id for request_id in self._changed if request_id in request_ids]
        deltas = [self.take_delta(request_id) for request_id in changed]
        return [delta.final for delta in deltas if delta is not None and delta.final is not None]

    def _make_output(self, state: _RequestState, error: RequestError | None) -> RequestOutput:
        completions = tuple(state.completions.values())
        # The counts are those of the first completion, because the others use what it has computed.
        first = completions[0].last or EngineCoreOutput(request_id="")
        features = state.request.mm_features
        stages = dict(state.stages)
        if state.sent is not None and first.times is not None:
            stages["transfer"] = max(0.0, first.times.arrived - state.sent)
        return RequestOutput(
            request_id=state.request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.request.prompt_token_ids,
            outputs=tuple(completion.make_output() for completion in completions),
            finished=True,
            prompt_logprobs=self._make_prompt_logprobs(state),
            num_cached_tokens=first.num_cached_tokens,
            num_encoder_hits=first.num_encoder_hits,
            encoder_hits=first.encoder_hits,
            encoder_loads=first.encoder_loads,
            results=state.results,
            mm_tokens=count_mm_tokens(features) if self._kind.media == "in_prompt" else {},
            mm_items=place_reports(state.mm_items, features),
            times=first.times,
            stages=stages,
            error=error,
        )

    def _make_prompt_logprobs(
        self, state: _RequestState
    ) -> tuple[dict[int, Logprob] | None, ...] | None:
        """Return the log-probabilities of the prompt's tokens, or `None` if not requested.

        The entry of the first token is `None`, because no token precedes it. If the request ended
        early, only the part that was computed is returned.
        """
        if state.request.sampling_params.prompt_logprobs is None:
            return None
        pairs = zip(state.request.prompt_token_ids[1:], state.prompt_logprobs, strict=False)
        return (
            None,
            *(make_logprobs(self._get_text, token_id, entry) for token_id, entry in pairs),
        )


def _make_error(last: EngineCoreOutput) -> RequestError | None:
    """Return the error with which a request has failed, or `None` if it has not failed."""
    if last.finish_reason is not FinishReason.ERROR:
        return None
    error = (
        RequestError("the engine failed to run the request, and gave no reason")
        if last.error is None
        else last.error.make_error()
    )
    return error if isinstance(error, RequestError) else RequestError(str(error))


def count_mm_tokens(features: Iterable[MultiModalFeatureSpec]) -> dict[str, int]:
    """Return how many positions of a prompt take embeddings: modality -> number of positions."""
    counts: defaultdict[str, int] = defaultdict(int)
    for feature in features:
        counts[feature.modality] += feature.mm_position.get_num_embeds()
    return dict(counts)


def place_reports(
    reports: Sequence[MediaItemReport], features: Sequence[MultiModalFeatureSpec]
) -> tuple[MediaItemReport, ...]:
    """Return the reports of media items, each with its index and its end in the prompt.

    The end is in tokens, and exclusive. The reports are grouped by modality, the features are in
    the order of the prompt. Within a modality both have the same order.
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    for mm_index, feature in enumerate(features):
        places[feature.modality].append(mm_index)
    queues: dict[str, Iterator[int]] = {key: iter(value) for key, value in places.items()}
    placed = []
    for report in reports:
        mm_index = next(queues[report.modality])
        end = features[mm_index].mm_position.end
        placed.append(replace(report, mm_index=mm_index, prompt_end=end))
    return tuple(placed)
