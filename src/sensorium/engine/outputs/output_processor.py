"""From the core's outputs to what a caller reads: text, stop strings, log-probabilities, counts.

A request is either returned when it has ended, or streamed: then its news are taken after each
step, the last with the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sensorium.engine.outputs.completion import Completion, make_logprobs, make_token_text
from sensorium.engine.outputs.parallel_sampling import get_child_ids
from sensorium.engine.outputs.report_places import place_reports
from sensorium.types.errors import RequestError
from sensorium.types.outputs import Logprob, MediaItemReport, RequestDelta, RequestOutput
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs
from sensorium.types.times import ItemTimes


@dataclass(slots=True)
class _RequestState:
    """`completions` are by their ids in the core, in the order of their indices."""

    request: EngineCoreRequest
    prompt: str | None
    completions: dict[str, Completion]
    is_streamed: bool
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    mm_items: tuple[MediaItemReport, ...] = ()
    stages: ItemTimes = field(default_factory=dict)
    final: RequestOutput | None = None


class OutputProcessor:
    """Owns the text of all requests in flight."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._get_text = make_token_text(tokenizer)
        self._states: dict[str, _RequestState] = {}  # by the caller's id
        self._owners: dict[str, _RequestState] = {}  # by the ids in the core that have not ended
        self._news: dict[str, _RequestState] = {}  # streamed ones whose deltas were not taken yet

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, *, is_streamed: bool = False
    ) -> None:
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
        stages: ItemTimes | None = None,
    ) -> None:
        """How the request and its media came to the core, once that is known."""
        state = self._states[request_id]
        state.mm_items = mm_items
        state.stages = stages or {}

    @property
    def changed_ids(self) -> tuple[str, ...]:
        """The callers' ids of streamed requests that have something to take."""
        return tuple(self._news)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The callers' ids of the requests that have not ended."""
        return tuple(self._states)

    def has_request(self, request_id: str) -> bool:
        """Whether somebody waits for it, and it has not ended."""
        return request_id in self._states

    def get_child_ids(self, request_ids: Iterable[str]) -> list[str]:
        """The ids in the core that belong to the callers' ids, as far as these are known."""
        states = (self._states.get(request_id) for request_id in request_ids)
        return [child_id for state in states if state is not None for child_id in state.completions]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nobody waits for these any more."""
        for child_id in self.get_child_ids(request_ids):
            self._owners.pop(child_id, None)
        for request_id in request_ids:
            self._states.pop(request_id, None)
            self._news.pop(request_id, None)

    def process(self, outputs: Sequence[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """The requests that ended and are not streamed, and the ids of the core's requests that met
        a stop string, or whose sibling failed or was aborted: the core must abort them.
        """
        finished: list[RequestOutput] = []
        stopped: list[str] = []
        for output in outputs:
            state = self._owners.get(output.request_id)
            if state is None:
                continue  # it ended at a stop string, or with a sibling, before
            state.prompt_logprobs.extend(output.prompt_logprobs)
            completion = state.completions[output.request_id]
            completion.add(output)
            if state.is_streamed:
                self._news[state.request.request_id] = state
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
                self._end(state, last=output, finished=finished)
        return finished, stopped

    def _end(
        self, state: _RequestState, *, last: EngineCoreOutput, finished: list[RequestOutput]
    ) -> None:
        self.forget((state.request.request_id,))
        state.final = self._make_output(state, last=last)
        if state.is_streamed:
            self._news[state.request.request_id] = state
        else:
            finished.append(state.final)

    def take_delta(self, request_id: str) -> RequestDelta | None:
        """What one streamed request has got since the last time, however long ago that was."""
        state = self._news.pop(request_id, None)
        return None if state is None else _take_delta(state)

    def take_deltas(self) -> list[RequestDelta]:
        """What the streamed requests have got since the last time. The last of each has `final`."""
        news, self._news = self._news, {}
        return [delta for delta in map(_take_delta, news.values()) if delta is not None]

    def _make_output(self, state: _RequestState, *, last: EngineCoreOutput) -> RequestOutput:
        """The counts are those of the first completion: its siblings found what it left."""
        is_error = last.finish_reason is FinishReason.ERROR
        completions = tuple(state.completions.values())
        first = completions[0].last
        return RequestOutput(
            request_id=state.request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.request.prompt_token_ids,
            outputs=tuple(completion.make_output() for completion in completions),
            finished=True,
            prompt_logprobs=self._make_prompt_logprobs(state),
            num_cached_tokens=0 if first is None else first.num_cached_tokens,
            num_encoder_hits=0 if first is None else first.num_encoder_hits,
            encoder_hits=() if first is None else first.encoder_hits,
            mm_items=place_reports(state.mm_items, state.request.mm_features),
            times=None if first is None else first.times,
            stages=state.stages,
            error=_make_error(last) if is_error else None,
        )

    def _make_prompt_logprobs(
        self, state: _RequestState
    ) -> tuple[dict[int, Logprob] | None, ...] | None:
        """Shorter than the prompt if the request ended within it."""
        if state.request.sampling_params.prompt_logprobs is None:
            return None
        pairs = zip(state.request.prompt_token_ids[1:], state.prompt_logprobs, strict=False)
        return (
            None,
            *(make_logprobs(self._get_text, token_id, entry) for token_id, entry in pairs),
        )


def _make_error(last: EngineCoreOutput) -> RequestError:
    """Return the error of a request that has failed. A lack of room fails it as well."""
    error = RequestError("the request failed") if last.error is None else last.error.make_error()
    return error if isinstance(error, RequestError) else RequestError(str(error))


def _take_delta(state: _RequestState) -> RequestDelta | None:
    is_last = state.final is not None
    taken = [completion.take_delta(is_last=is_last) for completion in state.completions.values()]
    deltas = tuple(delta for delta in taken if delta is not None)
    if not deltas and not is_last:
        return None
    return RequestDelta(
        request_id=state.request.request_id,
        prompt_token_ids=state.request.prompt_token_ids,
        deltas=deltas,
        final=state.final,
    )
