"""The `n` completions of a request: those that wait for the first one, and the text of each.

Each completion is a request of the core. The first one starts alone; the others start with its
first token. By then the prompt is in the prefix cache and its media in the encoder cache, so that
they compute only the prompt's last tokens. `ParallelSampling` owns the completions that have not
started, with the handles of their media.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from sensorium.engine.outputs.text_reader import TextReader
from sensorium.multimodal.pipeline import CachedItem
from sensorium.types.outputs import CompletionDelta, CompletionOutput, Logprob
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs

Items = Sequence[CachedItem]
TokenText = Callable[[int], str]
_MAX_TOKEN_TEXTS = 2**16


def get_child_ids(request: EngineCoreRequest) -> tuple[str, ...]:
    """Return the ids of a request's `n` completions in the core; if `n` is 1, the request's own."""
    n = request.sampling_params.n
    if n == 1:
        return (request.request_id,)
    return tuple(f"{request.request_id}#{index}" for index in range(n))


def make_children(request: EngineCoreRequest) -> tuple[EngineCoreRequest, ...]:
    """Split a request into `n` requests for the core, one for each completion.

    The first has the request's seed, from which the other seeds are derived. Only the first returns
    log-probabilities of the prompt.
    """
    params = request.sampling_params
    if params.n == 1:
        return (request,)
    first = replace(params, n=1)
    return tuple(
        replace(
            request,
            request_id=child_id,
            completion_index=index,
            group=request.group or request.request_id,
            sampling_params=first
            if index == 0
            else replace(first, seed=_derive_seed(params.seed, index), prompt_logprobs=None),
        )
        for index, child_id in enumerate(get_child_ids(request))
    )


def _derive_seed(seed: int | None, index: int) -> int:
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCompletions:
    """The completions of one request that wait for its first one, with their media items."""

    request_id: str  # of the request
    children: tuple[EngineCoreRequest, ...]
    items: Items


class ParallelSampling:
    """A store of completions that wait until the first one of their request has a token.

    `release` is called with the media items of completions that never start.
    """

    def __init__(self, release: Callable[[Items], None]) -> None:
        self._release = release
        self._waiting: dict[str, WaitingCompletions] = {}  # id of the first completion -> the rest

    def add(self, request: EngineCoreRequest, items: Items) -> tuple[EngineCoreRequest, bool]:
        """Return a request's first completion, to start at once, and whether there are others."""
        first, *rest = make_children(request)
        if rest:
            self._waiting[first.request_id] = WaitingCompletions(
                request_id=request.request_id, children=tuple(rest), items=items
            )
        return first, bool(rest)

    def take_ready(self, outputs: Iterable[EngineCoreOutput]) -> list[WaitingCompletions]:
        """Return the waiting completions that may start after these outputs of the core.

        They may start when the first completion of their request has a token. If it failed or was
        aborted, they are dropped. The caller has to release the media items of what is returned.
        """
        ready: list[WaitingCompletions] = []
        for output in outputs if self._waiting else ():
            if output.new_token_ids and output.request_id in self._waiting:
                ready.append(self._waiting.pop(output.request_id))
            elif output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self.drop((output.request_id,))
        return ready

    def drop(self, child_ids: Iterable[str]) -> None:
        """Drop the completions that wait for these first ones, and release their media items."""
        for child_id in child_ids:
            waiting = self._waiting.pop(child_id, None)
            if waiting is not None:
                self._release(waiting.items)

    def __len__(self) -> int:
        return len(self._waiting)


class Completion:
    """One of a request's `n` completions: its growing text, token ids and log-probabilities."""

    def __init__(
        self, request: EngineCoreRequest, index: int, tokenizer: Any, get_text: TokenText
    ) -> None:
        self.index = index
        # The core's last output for this completion, or the one in which a stop string was found.
        self.last: EngineCoreOutput | None = None
        self._params = request.sampling_params
        self._get_text = get_text
        self._eos_token_ids = frozenset(request.eos_token_ids)
        self._reader = TextReader(
            tokenizer, self._params, prompt_token_ids=request.prompt_token_ids
        )
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._num_taken_tokens = 0
        self._is_ended = False  # its last delta was taken

    def add(self, output: EngineCoreOutput) -> None:
        """Add an output of the core to this completion, which must not have ended yet."""
        self._logprobs.extend(output.logprobs)
        is_last = output.finish_reason is not None
        for token_id in output.new_token_ids:
            self._token_ids.append(token_id)
            is_closing = self._is_closing(output, token_id)
            self._reader.add_token(token_id, is_last=is_last, is_closing=is_closing)
        if is_last and not output.new_token_ids:
            self._reader.finish()
        if is_last or self._reader.stop_string is not None:
            self.last = output

    def _is_closing(self, output: EngineCoreOutput, token_id: int) -> bool:
        """Return whether a token only ends the answer, so that its text is no part of the answer.

        A token that completes a grammar is a part of it, unless it is an end-of-sequence token.
        """
        if output.finish_reason is not FinishReason.STOP:
            return False
        may_be_text = self._params.structured_outputs is not None and output.stop_token_id is None
        return not may_be_text or token_id in self._eos_token_ids

    def take_delta(self, *, is_last: bool = False) -> CompletionDelta | None:
        """Return the new part that later tokens can't change, or `None` if there is none.

        With `is_last`, text that may begin a stop string is no longer held back, and a completion
        that has not ended counts as aborted.
        """
        is_last = is_last or self.last is not None
        if self._is_ended or (not is_last and self._num_taken_tokens == len(self._token_ids)):
            return None
        first_token, self._num_taken_tokens = self._num_taken_tokens, len(self._token_ids)
        self._is_ended = is_last
        return CompletionDelta(
            index=self.index,
            text=self._reader.take_text(is_last=is_last),
            token_ids=tuple(self._token_ids[first_token:]),
            finish_reason=self._finish_reason if is_last else None,
            stop_reason=self._stop_reason if is_last else None,
            logprobs=self._make_logprobs(first_token),
        )

    def make_output(self) -> CompletionOutput:
        """Return the whole completion, or the part that was generated before it was aborted."""
        logprobs = self._make_logprobs(0)
        return CompletionOutput(
            index=self.index,
            text=self._reader.text,
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            cumulative_logprob=None if logprobs is None else sum(e.logprob for e in self._logprobs),
            logprobs=logprobs,
        )

    @property
    def _finish_reason(self) -> FinishReason | None:
        if self._reader.stop_string is not None:
            return FinishReason.STOP
        return FinishReason.ABORT if self.last is None else self.last.finish_reason

    @property
    def _stop_reason(self) -> str | int | None:
        if self._reader.stop_string is not None:
            return self._reader.stop_string
        return None if self.last is None else self.last.stop_token_id

    def _make_logprobs(self, first_token: int) -> tuple[dict[int, Logprob], ...] | None:
        if self._params.logprobs is None:
            return None
        new = zip(self._token_ids[first_token:], self._logprobs[first_token:], strict=True)
        return tuple(make_logprobs(self._get_text, token_id, entry) for token_id, entry in new)


def make_token_text(tokenizer: Any) -> TokenText:
    """Return a function that returns the text of a single token id, with a cache.

    A prompt may have a hundred thousand positions with twenty tokens each, mostly the same ones.
    """

    @lru_cache(maxsize=_MAX_TOKEN_TEXTS)
    def get_text(token_id: int) -> str:
        text: str = tokenizer.decode([token_id])
        return text

    return get_text


def make_logprobs(get_text: TokenText, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
    """Return a dict from token ids to log-probabilities and ranks, for one position of a text.

    It has the likeliest tokens in `entry`, and always `token_id`, the token at that position.
    """
    ranked = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    logprobs = {
        top_id: Logprob(logprob=logprob, rank=rank, decoded_token=get_text(top_id))
        for rank, (top_id, logprob) in enumerate(ranked, start=1)
    }
    logprobs[token_id] = Logprob(
        logprob=entry.logprob, rank=entry.rank, decoded_token=get_text(token_id)
    )
    return logprobs
