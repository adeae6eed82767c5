"""From the core's outputs to what a caller reads: text, stop strings, log-probabilities, counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sensorium.engine.detokenizer import Detokenizer, find_stop
from sensorium.types.errors import RequestError
from sensorium.types.outputs import CompletionOutput, Logprob, RequestOutput
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs


@dataclass(slots=True)
class _RequestState:
    request: EngineCoreRequest
    prompt: str | None
    detokenizer: Detokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_string: str | None = None
    text_end: int | None = None  # where a stop string cuts the text


class OutputProcessor:
    """Owns the text of all requests in flight."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _RequestState] = {}

    def add_request(self, request: EngineCoreRequest, prompt: str | None) -> None:
        detokenizer = Detokenizer(self._tokenizer, request.prompt_token_ids)
        self._states[request.request_id] = _RequestState(request, prompt, detokenizer)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nobody waits for these any more."""
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def process(self, outputs: Sequence[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """The requests that ended, and the ids of those that met a stop string: the core must
        abort them.
        """
        finished: list[RequestOutput] = []
        stopped: list[str] = []
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue  # it ended at a stop string before
            self._add_tokens(state, output)
            if state.stop_string is not None and output.finish_reason is None:
                stopped.append(output.request_id)
            if state.stop_string is not None or output.finish_reason is not None:
                del self._states[output.request_id]
                finished.append(self._make_output(state, output))
        return finished, stopped

    def _add_tokens(self, state: _RequestState, output: EngineCoreOutput) -> None:
        params = state.request.sampling_params
        state.logprobs.extend(output.logprobs)
        for token_id in output.new_token_ids:
            state.token_ids.append(token_id)
            length = len(state.detokenizer.text)
            is_stop_token = output.finish_reason is FinishReason.STOP
            if not is_stop_token or params.include_stop_str_in_output:
                state.detokenizer.add(token_id)
            if output.finish_reason is not None:
                state.detokenizer.finish()
            if params.stop and len(state.token_ids) > params.min_tokens:
                self._apply_stop(state, num_new_characters=len(state.detokenizer.text) - length)
        if output.finish_reason is not None and not output.new_token_ids:
            state.detokenizer.finish()

    def _apply_stop(self, state: _RequestState, *, num_new_characters: int) -> None:
        params = state.request.sampling_params
        found = find_stop(
            state.detokenizer.text, params.stop, num_new_characters=num_new_characters
        )
        if found is not None:
            state.stop_string, start = found
            state.text_end = start + (len(found[0]) if params.include_stop_str_in_output else 0)

    def _make_output(self, state: _RequestState, output: EngineCoreOutput) -> RequestOutput:
        reason = output.finish_reason if state.stop_string is None else FinishReason.STOP
        error = None
        if reason is FinishReason.ERROR:
            error = RequestError(output.error or "the request failed")
        logprobs = None
        if state.request.sampling_params.logprobs is not None:
            logprobs = tuple(
                self._make_logprobs(token_id, entry)
                for token_id, entry in zip(state.token_ids, state.logprobs, strict=True)
            )
        completion = CompletionOutput(
            index=0,
            text=state.detokenizer.text[: state.text_end],
            token_ids=tuple(state.token_ids),
            finish_reason=reason,
            stop_reason=state.stop_string or output.stop_token_id,
            cumulative_logprob=None if logprobs is None else sum(e.logprob for e in state.logprobs),
            logprobs=logprobs,
        )
        return RequestOutput(
            request_id=state.request.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.request.prompt_token_ids,
            outputs=(completion,),
            finished=True,
            num_cached_tokens=output.num_cached_tokens,
            num_encoder_hits=output.num_encoder_hits,
            error=error,
        )

    def _make_logprobs(self, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        logprobs = {
            top_id: self._make_logprob(top_id, logprob, rank)
            for rank, (top_id, logprob) in enumerate(
                zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1
            )
        }
        logprobs[token_id] = self._make_logprob(token_id, entry.logprob, entry.rank)
        return logprobs

    def _make_logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob=logprob, rank=rank, decoded_token=self._tokenizer.decode([token_id]))
