"""Turns the core's outputs into outputs for callers: text, log-probabilities, counts and reports.

A request is either returned when it has ended, or streamed. The deltas of a streamed request can be
taken at any time, and the last one has the whole request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sensorium.engine.outputs.completions import (
    Completion,
    get_child_ids,
    make_logprobs,
    make_token_text,
)
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ItemTimes, MultiModalFeatureSpec
from sensorium.types.outputs import Logprob, MediaItemReport, RequestDelta, RequestOutput
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs


@dataclass(slots=True)
class _RequestState:
    """A request that has not ended, or that has deltas to be taken."""

    request: EngineCoreRequest
    prompt: str | None
    completions: dict[str, Completion]  # id in the core -> completion, in the order of indices
    is_streamed: bool
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    mm_items: tuple[MediaItemReport, ...] = ()
    stages: ItemTimes = field(default_factory=dict)
    sent: float | None = None  # when it was sent to the core
    final: RequestOutput | None = None


class OutputProcessor:
    """The text of all requests in flight.

    A request has the id that its engine gave it; its completions have ids of their own in the core.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._get_text = make_token_text(tokenizer)
        self._states: dict[str, _RequestState] = {}  # request id -> state, until the request ends
        self._owners: dict[str, _RequestState] = {}  # id in the core -> state, until that ends
        self._changed: dict[str, _RequestState] = {}  # request id -> state with a delta to take

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, *, is_streamed: bool = False
    ) -> None:
        """Register a request, so that outputs of its completions are taken."""
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
        """Note how a request and its media came to the core, and when they were sent."""
        state = self._states[request_id]
        state.mm_items, state.stages, state.sent = mm_items, stages, sent

    @property
    def changed_ids(self) -> tuple[str, ...]:
        """The streamed requests that have a delta to take."""
        return tuple(self._changed)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests that have not ended."""
        return tuple(self._states)

    @property
    def streamed_ids(self) -> tuple[str, ...]:
        """The streamed requests that have not ended."""
        return tuple(key for key, state in self._states.items() if state.is_streamed)

    def has_request(self, request_id: str) -> bool:
        """Return whether a request has not ended and is still wanted."""
        return request_id in self._states

    def get_child_ids(self, request_ids: Iterable[str]) -> list[str]:
        """Return the core's ids of requests that have not ended. Other requests are ignored."""
        states = (self._states.get(request_id) for request_id in request_ids)
        return [child_id for state in states if state is not None for child_id in state.completions]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Forget requests, and their deltas that were not taken."""
        for child_id in self.get_child_ids(request_ids):
            self._owners.pop(child_id, None)
        for request_id in request_ids:
            self._states.pop(request_id, None)
            self._changed.pop(request_id, None)

    def process(self, outputs: Sequence[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Take outputs of the core. Return ended requests, and ids that the core must abort.

        The requests are those that are not streamed. The ids are those of completions that met a
        stop string, or belong to a request that failed.
        """
        finished: list[RequestOutput] = []
        stopped: list[str] = []
        for output in outputs:
            state = self._owners.get(output.request_id)
            if state is None:
                continue  # it has already ended, at a stop string or with its request
            state.prompt_logprobs.extend(output.prompt_logprobs)
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
        """End a request with an error. Return what `process` returns."""
        state = self._states.get(request_id)
        if state is None:
            return [], []
        stopped = [child_id for child_id in state.completions if child_id in self._owners]
        for child_id in stopped:
            end = EngineCoreOutput(request_id=child_id, finish_reason=FinishReason.ERROR)
            state.completions[child_id].add(end)
        return self._end(state, error=error), stopped

    def _end(self, state: _RequestState, *, error: RequestError | None) -> list[RequestOutput]:
        """End a request; return its output unless it is streamed."""
        self.forget((state.request.request_id,))
        state.final = self._make_output(state, error)
        if not state.is_streamed:
            return [state.final]
        self._changed[state.request.request_id] = state
        return []

    def take_delta(self, request_id: str) -> RequestDelta | None:
        """Return what a streamed request got since the last call, or `None` if it got nothing.

        The last delta has `final`.
        """
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

    def _make_output(self, state: _RequestState, error: RequestError | None) -> RequestOutput:
        completions = tuple(state.completions.values())
        # The counts are those of the first completion, because the others use what it has computed.
        first = completions[0].last or EngineCoreOutput(request_id="")
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
            mm_items=place_reports(state.mm_items, state.request.mm_features),
            times=first.times,
            stages=stages,
            error=error,
        )

    def _make_prompt_logprobs(
        self, state: _RequestState
    ) -> tuple[dict[int, Logprob] | None, ...] | None:
        """Return the prompt's log-probabilities, or those of the part that was computed."""
        if state.request.sampling_params.prompt_logprobs is None:
            return None
        pairs = zip(state.request.prompt_token_ids[1:], state.prompt_logprobs, strict=False)
        return (
            None,
            *(make_logprobs(self._get_text, token_id, entry) for token_id, entry in pairs),
        )


def _make_error(last: EngineCoreOutput) -> RequestError | None:
    """Return the error of a request that has failed. A `CapacityError` becomes a `RequestError`."""
    if last.finish_reason is not FinishReason.ERROR:
        return None
    error = RequestError("the request failed") if last.error is None else last.error.make_error()
    return error if isinstance(error, RequestError) else RequestError(str(error))


def place_reports(
    reports: Sequence[MediaItemReport], features: Sequence[MultiModalFeatureSpec]
) -> tuple[MediaItemReport, ...]:
    """Return the reports with the place of each item in the prompt.

    Reports are grouped by modality, in the order of that modality's markers; the features of a
    request are in the order of the prompt.
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
