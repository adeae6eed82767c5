"""Follows the grammars of requests: which tokens may come next, and when an answer is complete.

Owns a matcher for each request that has `structured_outputs`: it tracks the place of the output in
the grammar. Threads compile a grammar when its request arrives, and fill a mask when the token
before it is chosen, while the model computes. A step waits for masks for a short time only. If the
mask of a request is late, only that request gets no token in this step.
"""

from __future__ import annotations

import copy
import logging
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property

from sensorium.grammar.compiler import GrammarCompiler, Matcher, Words
from sensorium.types.errors import RequestError
from sensorium.types.request import EngineCoreRequest
from sensorium.worker.request_states import RequestState

logger = logging.getLogger(__name__)
# About as long as a step of a large model, and longer than it takes to fill all masks of a batch.
MAX_WAIT_S = 0.05
_NUM_COMPILERS = 2
_MAX_FILLERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMasks:
    """The masks of one step: the tokens that each request's grammar allows next."""

    masks: Mapping[str, Words] = field(default_factory=dict)  # by id of a request with a grammar
    late_ids: frozenset[str] = frozenset()  # requests with masks that are not filled yet
    failures: Mapping[str, RequestError] = field(default_factory=dict)  # request id -> why it fails

    def is_without(self, request_id: str) -> bool:
        """Return whether a request gets no token in this step."""
        return request_id in self.late_ids or request_id in self.failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The requests of a step with a grammar that is now complete or has failed."""

    completed_ids: frozenset[str] = frozenset()  # requests with grammars that allow no more tokens
    failures: Mapping[str, RequestError] = field(default_factory=dict)  # request id -> why it fails


_PATH = ("structured_outputs",)


class _Entry:
    """The grammar of one request: its matcher, its next mask, and the error if it has failed.

    A thread of the pools writes `mask` and `failure`, and sets `is_ready` last. The step reads them
    only when `is_ready` is set, so no lock is needed.
    """

    def __init__(self, request: EngineCoreRequest, num_consumed: int) -> None:
        self.request = request
        self.matcher: Matcher | None = None  # None until the grammar is compiled
        self.mask: Words | None = None
        self.failure: RequestError | None = None
        self.num_consumed = num_consumed  # output tokens that the matcher has consumed
        self.is_ready = False
        self.is_late = False  # the last step ran without its mask
        self.jobs: Sequence[Future[None]] = ()  # one of them makes the entry ready
        # The state of the request's present run. Tokens of an earlier run are ignored.
        self.state: RequestState | None = None


class GrammarMasks:
    """The matchers of all requests that have a grammar, and the threads that fill their masks."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        # None if the engine has no tokenizer. Requests with a grammar are then refused.
        self._compiler = compiler
        self._entries: dict[str, _Entry] = {}  # by request id

    # ---- requests come and go

    def add(self, request: EngineCoreRequest, output_token_ids: Sequence[int] = ()) -> None:
        """Begin to compile a request's grammar, if it has one, and to consume its output so far."""
        if request.sampling_params.structured_outputs is None:
            return
        if self._compiler is None:
            raise RequestError("can't be used, because this engine has no tokenizer", path=_PATH)
        entry = self._entries[request.request_id] = _Entry(request, len(output_token_ids))
        entry.jobs = (self._compilers.submit(self._prepare, entry, output_token_ids),)

    def start(self, request: EngineCoreRequest, output_token_ids: Sequence[int]) -> None:
        """Prepare the grammar of a request that starts to run, or resumes after a preemption."""
        # A matcher that has consumed a different number of tokens is made anew.
        entry = self._entries.get(request.request_id)
        if entry is None or entry.num_consumed != len(output_token_ids):
            self.add(request, output_token_ids)
        else:
            entry.state = None

    def forget(self, request_id: str) -> None:
        self._entries.pop(request_id, None)

    # ---- one step

    def take(self, states: Sequence[RequestState]) -> StepMasks:
        """Return the masks of the requests that choose a token in this step.

        It waits up to `MAX_WAIT_S` seconds for masks. For a mask that was late in the last step it
        waits only if all requests of this step have a grammar, so that no other request is delayed.
        """
        entries = self._find(states)
        if not entries:
            return StepMasks()
        is_alone = len(entries) == len(states)
        pending = {
            job
            for entry in entries
            if not entry.is_ready and (is_alone or not entry.is_late)
            for job in entry.jobs
        }
        if pending:
            wait(pending, timeout=MAX_WAIT_S)
        masks, late, failures = {}, [], {}
        for entry, state in entries.items():
            entry.state = state
            request_id = entry.request.request_id
            entry.is_late = not entry.is_ready
            if entry.is_late:
                late.append(request_id)
            elif entry.failure is not None:
                failures[request_id] = entry.failure
            else:
                masks[request_id] = self._get_mask(entry)
        return StepMasks(masks=masks, late_ids=frozenset(late), failures=failures)

    def consume(self, tokens: Iterable[tuple[RequestState, int]]) -> Progress:
        """Advance the matchers by the chosen tokens, and begin to fill the next masks in threads.

        Requests without a grammar, and those that have ended or were started again, are ignored.
        """
        completed, failures, continuing = [], {}, []
        for state, token_id in tokens:
            entry = self._entries.get(state.request.request_id)
            if entry is None or entry.state is not state:
                continue
            matcher = _get_matcher(entry)
            matcher.consume((token_id,))
            entry.num_consumed += 1
            if matcher.error is not None:
                failures[entry.request.request_id] = _make_error(entry, matcher.error)
            elif matcher.is_complete:
                completed.append(entry.request.request_id)
            elif entry.num_consumed != state.params.max_tokens:
                continuing.append(entry)
        self._begin(continuing)
        return Progress(completed_ids=frozenset(completed), failures=failures)

    def _find(self, states: Sequence[RequestState]) -> dict[_Entry, RequestState]:
        if not self._entries:
            return {}
        found = ((self._entries.get(state.request.request_id), state) for state in states)
        return {entry: state for entry, state in found if entry is not None}

    def _begin(self, entries: Sequence[_Entry]) -> None:
        """Start threads that fill the next masks of these requests.

        A thread takes the next request of a queue when it is free: a slow mask delays no others.
        """
        if not entries:
            return
        queue = deque(entries)
        for entry in entries:
            entry.is_ready = False
        num_jobs = min(len(entries), _get_num_fillers())
        jobs = [self._fillers.submit(self._fill_all, queue) for _ in range(num_jobs)]
        for entry in entries:
            entry.jobs = jobs

    def _get_mask(self, entry: _Entry) -> Words:
        """Return the mask of a request, without the end-of-sequence tokens if it may not end yet.

        If the grammar allows only these tokens, the output is complete, and the request ends
        anyway.
        """
        request, mask = entry.request, entry.mask
        params = request.sampling_params
        may_end = (
            bool(request.eos_token_ids)
            and not params.ignore_eos
            and entry.num_consumed >= params.min_tokens
        )
        if may_end or mask is None or self._compiler is None:
            return mask  # type: ignore[return-value]
        others = mask & ~self._compiler.end_mask
        return others if others.any() else mask

    # ---- in threads

    def _prepare(self, entry: _Entry, output_token_ids: Sequence[int]) -> None:
        params, compiler = entry.request.sampling_params.structured_outputs, self._compiler
        if self._entries.get(entry.request.request_id) is not entry:
            return  # the request has ended or its entry was replaced: don't delay others
        try:
            if params is not None and compiler is not None:
                entry.matcher = compiler.compile(params)
                entry.matcher.consume(output_token_ids)
                entry.mask = compiler.make_mask()
                self._fill(entry)
        except RequestError as error:
            entry.failure = copy.copy(error)  # the error itself holds this frame, and so the entry
        except Exception as error:  # fails this request alone: a tokenizer that can't be loaded
            logger.exception("the grammar of a request could not be compiled: the request fails")
            entry.failure = RequestError(str(error), path=_PATH)
        entry.is_ready = True

    def _fill_all(self, queue: deque[_Entry]) -> None:
        while queue:
            try:
                entry = queue.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                self._fill(entry)
            except Exception as error:  # fails this request alone
                logger.exception("a request fails: the token mask of its grammar was not computed")
                entry.failure = _make_error(entry, str(error))
            entry.is_ready = True

    def _fill(self, entry: _Entry) -> None:
        matcher = _get_matcher(entry)
        matcher.fill_mask(entry.mask)  # type: ignore[arg-type]
        if matcher.error is not None:
            entry.failure = _make_error(entry, matcher.error)

    @cached_property
    def _compilers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="grammar-compiler")

    @cached_property
    def _fillers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_get_num_fillers(), thread_name_prefix="grammar-mask")


def _get_matcher(entry: _Entry) -> Matcher:
    if entry.matcher is None:
        raise RequestError("the grammar is used before it is compiled", path=_PATH)
    return entry.matcher


def _make_error(entry: _Entry, error: str) -> RequestError:
    params = entry.request.sampling_params.structured_outputs
    path = _PATH if params is None else (*_PATH, params.kind)
    return RequestError(f"can't be followed any further: {error}", path)


def _get_num_fillers() -> int:
    return max(2, min(_MAX_FILLERS, len(os.sched_getaffinity(0)) // 2))
