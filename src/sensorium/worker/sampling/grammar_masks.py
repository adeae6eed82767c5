"""Follows the grammars of requests: which tokens may come next, and when an answer is complete.

Owns a matcher per request that has `structured_outputs`. Grammars are compiled and masks are filled
in threads, from the moment that a request or its newest token is known, so that the model computes
meanwhile. A step waits for them only for a moment: a request whose mask is late then gets no token
in this step, and the others do.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property

from sensorium.grammar.compiler import GrammarCompiler
from sensorium.grammar.matcher import Matcher, Words
from sensorium.types.errors import RequestError
from sensorium.types.request import EngineCoreRequest
from sensorium.worker.request_states import RequestState

logger = logging.getLogger(__name__)
MAX_WAIT_S = 0.05  # as long as a step of a large model, and longer than all masks of a batch take
_NUM_COMPILERS = 2
_MAX_FILLERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMasks:
    """By request id: `masks` of those that have one; `late_ids` have none yet; `failures` never
    will.
    """

    masks: Mapping[str, Words] = field(default_factory=dict)
    late_ids: frozenset[str] = frozenset()
    failures: Mapping[str, RequestError] = field(default_factory=dict)

    def is_without(self, request_id: str) -> bool:
        """Whether no token can be chosen for it in this step."""
        return request_id in self.late_ids or request_id in self.failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What new tokens mean: `completed_ids` have said all that their grammar allows."""

    completed_ids: frozenset[str] = frozenset()
    failures: Mapping[str, RequestError] = field(default_factory=dict)


_NO_MASKS = StepMasks()
_PATH = ("structured_outputs",)
_NO_PROGRESS = Progress()


class _Entry:
    """`mask` and `failure` are written by the thread that `jobs` are run in, before `is_ready`."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.matcher: Matcher | None = None
        self.mask: Words | None = None
        self.failure: RequestError | None = None
        self.num_consumed = 0
        self.is_ready = False
        self.is_late = False
        self.jobs: Sequence[Future[None]] = ()


class GrammarMasks:
    """`compiler`: `None` where no tokenizer is at hand, and requests with a grammar are refused."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._entries: dict[str, _Entry] = {}

    # ---- requests come and go

    def add(self, request: EngineCoreRequest) -> None:
        """Begin to compile its grammar, if it has one."""
        if request.sampling_params.structured_outputs is None:
            return
        if self._compiler is None:
            raise RequestError("this engine has no tokenizer to follow a grammar", path=_PATH)
        entry = self._entries[request.request_id] = _Entry(request)
        entry.jobs = (self._compilers.submit(self._prepare, entry, ()),)

    def start(self, request: EngineCoreRequest, output_token_ids: Sequence[int]) -> None:
        """It runs from here on; resumed after a preemption, with the tokens that it has made."""
        if request.sampling_params.structured_outputs is None:
            return
        if request.request_id not in self._entries:
            self.add(request)
        entry = self._entries[request.request_id]
        if entry.num_consumed != len(output_token_ids):
            entry = self._entries[request.request_id] = _Entry(request)
            entry.num_consumed = len(output_token_ids)
            entry.jobs = (self._compilers.submit(self._prepare, entry, output_token_ids),)

    def forget(self, request_id: str) -> None:
        self._entries.pop(request_id, None)

    # ---- one step

    def take(self, states: Sequence[RequestState]) -> StepMasks:
        """The masks of those that choose a token now. Waits for what was begun since the last
        time; and for what was late then, if nobody else is kept from a token.
        """
        entries = self._find(states)
        if not entries:
            return _NO_MASKS
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
        for entry in entries:
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
        """These tokens were chosen. The masks behind them are begun at once."""
        completed, failures, going_on = [], {}, []
        for state, token_id in tokens:
            if state.params.structured_outputs is None:
                continue
            entry = self._entries[state.request.request_id]
            matcher = _get_matcher(entry)
            matcher.consume((token_id,))
            entry.num_consumed += 1
            if matcher.error is not None:
                failures[entry.request.request_id] = _make_error(entry, matcher.error)
            elif matcher.is_complete:
                completed.append(entry.request.request_id)
            elif entry.num_consumed != state.params.max_tokens:
                going_on.append(entry)
        self._begin(going_on)
        if not completed and not failures:
            return _NO_PROGRESS
        return Progress(completed_ids=frozenset(completed), failures=failures)

    def _find(self, states: Sequence[RequestState]) -> list[_Entry]:
        if not self._entries:
            return []
        found = (self._entries.get(state.request.request_id) for state in states)
        return [entry for entry in found if entry is not None]

    def _begin(self, entries: Sequence[_Entry]) -> None:
        """Whichever thread is free takes the next entry, so that a slow one holds up nobody."""
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
        """Without the tokens that end it, where these must not; if nothing else is left, the answer
        is complete, and ends all the same.
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
            return  # it has ended: others wait for this thread
        try:
            if params is not None and compiler is not None:
                entry.matcher = compiler.compile(params)
                entry.matcher.consume(output_token_ids)
                entry.mask = compiler.make_mask()
                self._fill(entry)
        except RequestError as error:
            entry.failure = error
        except Exception as error:  # of this request alone: a tokenizer that can't be loaded
            logger.exception("a grammar could not be compiled")
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
            except Exception as error:  # of this request alone
                logger.exception("a mask could not be filled")
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
        raise RequestError("a token came before its grammar", path=_PATH)
    return entry.matcher


def _make_error(entry: _Entry, error: str) -> RequestError:
    params = entry.request.sampling_params.structured_outputs
    path = _PATH if params is None else (*_PATH, params.kind)
    return RequestError(f"can't be followed any further: {error}", path)


def _get_num_fillers() -> int:
    return max(2, min(_MAX_FILLERS, len(os.sched_getaffinity(0)) // 2))
