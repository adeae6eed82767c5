"""Decides which requests run in the next step, with how many tokens and which encoder inputs.

Owns all requests and their order. Holds no tensors and does no I/O.

Invariants:
  1. Every accepted request gets exactly one output with a finish reason.
  2. A step has at most max(max_num_batched_tokens, one unsplittable span) tokens.
  3. A request that was given work in a step is not preempted in that step.
  4. Requests are served in order, with four exceptions. Tokens are reserved for a media span that
     did not fit into the last step. Requests of a client call beyond its share are passed over,
     and so are held requests. Long prompts let other requests pass (`core.long_prompts`).
  5. The first running request is never preempted: all behind it can be preempted for it.
  6. A step is empty only if each request is held, waits for audio or for a request that waits for
     audio, or waits for the step under way.
  7. A step encodes at most one media item beyond the encoder budget. Later steps make up for it:
     they encode nothing while there is something else to do.
  8. A request that grows beyond `Limits.long_after` tokens is computed again from the start, once.
  9. A step may be planned while the one before it is under way; a request may be in both. The
     worker computes steps in order, so the next one may get blocks that are still in use.
 10. The results of a request that has ended, or was started again, are dropped.
 11. A live request (with audio that still arrives) is never preempted, because its audio is not
     kept. So a seat and blocks are reserved for it.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from operator import attrgetter

from sensorium.core.admission import Limits, check_growth, check_request, get_unsplittable_spans
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.long_prompts import LongPrompts
from sensorium.core.open_streams import OpenStreams
from sensorium.core.request import Rank, Request, RequestStatus, SchedulerCounters
from sensorium.core.seat_shares import SeatShares
from sensorium.core.waiting_queue import WaitingQueue
from sensorium.core.window_planner import Carryover, Shortage, Step, WindowPlan, WindowPlanner
from sensorium.types.errors import FailedRequestError, InvariantError, RequestError
from sensorium.types.request import (
    NO_RESULTS,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
)
from sensorium.types.scheduling import (
    BlockIds,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)

_rank_of = attrgetter("rank")
_FIRST = -(2**62)  # before all priorities


class Scheduler:
    """A scheduler that holds all requests, and plans each step of the model."""

    def __init__(
        self,
        limits: Limits,
        *,
        kv_cache: KVCacheManager,
        encoder_cache: EncoderCacheManager,
        policy: str = "fcfs",  # or "priority": lower values first, then first come, first served
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.kv_cache = kv_cache
        self.encoder_cache = encoder_cache
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in the order of service
        self.waiting = WaitingQueue()
        self.held: dict[str, Request] = {}  # by id; they are HELD, and have no seat and no blocks
        self.open_streams = OpenStreams(kv_cache, max_num_open=max(1, limits.max_num_seqs - 1))
        self.counters = SchedulerCounters()
        self._policy = policy
        self._clock = clock
        self._planner = WindowPlanner(limits, encoder_cache)
        self._shares = SeatShares(limits.max_num_seqs)
        self._long_prompts = LongPrompts(
            limits.long_prefill_token_threshold,
            pause=limits.long_prefill_pause,
            max_num_tokens=limits.max_num_batched_tokens,
            shares=self._shares,
        )
        self._num_arrivals = 0
        self._num_runs = 0
        self._stopped: list[str] = []
        self._carryover = Carryover()
        # The rank of the waiting request that found no room, and the number of releases by then.
        self._blocked: tuple[Rank, int] | None = None

    # ---- requests come and go

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Put a request into the queue, or raise a `RequestError` if it can never run."""
        if core_request.request_id in self.requests:
            raise RequestError(f"request id {core_request.request_id!r} is in use: choose another")
        check_request(core_request, self.limits)
        spans = get_unsplittable_spans(core_request.mm_features, self.limits)
        check_growth(core_request, self.limits, spans, self.kv_cache)
        priority = core_request.priority if self._policy == "priority" else 0
        priority = _FIRST if core_request.is_live else priority  # it can't wait for others
        request = Request(
            core_request,
            rank=(priority, self._num_arrivals),
            block_size=self.kv_cache.block_size,
            spans=spans,
            arrived=self._clock(),
            long_after=self.limits.long_after,
        )
        if request.is_open:
            self.open_streams.admit(request, self.limits)
        self.open_streams.hold_up_others = False  # the new request may be able to run
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        if request.num_received:
            self._enqueue(request)
        else:
            self.open_streams.add(request)

    def _enqueue(self, request: Request) -> None:
        """Put a request without blocks into the queue: among the long prompts if it has one."""
        if self._long_prompts.is_long(request, 0):
            hit = self.kv_cache.find_prefix(request, self._get_max_cached_tokens(request))
            if self._long_prompts.is_long(request, hit.num_tokens):
                self.waiting.long.add(request, request.num_tokens - hit.num_tokens)
                return
        self.waiting.add(request)

    def append_audio(
        self, request_id: str, num_positions: int, *, is_last: bool = False
    ) -> EngineCoreOutput | None:
        """Add audio for `num_positions` to a request; return its last output if that ends it."""
        if (request := self.requests.get(request_id)) is None or not request.is_open:
            return None  # it has ended, or has all of its audio
        request.num_received += num_positions
        request.is_open = not is_last
        if request.has_received_all:
            self._end(request, FinishReason.STOP)
            return request.make_output(FinishReason.STOP, self._clock())
        if request_id in self.open_streams and request.num_received > request.num_computed_tokens:
            self.open_streams.remove(request_id)
            if request.status is RequestStatus.RUNNING:
                insort(self.running, request, key=_rank_of)
            else:
                self._enqueue(request)
        return None

    def abort_request(self, request_id: str) -> EngineCoreOutput | None:
        """End a request early and return its last output, or `None` if it has ended already."""
        return self._finish(self.requests[request_id]) if request_id in self.requests else None

    def get_missing_items(self, request_id: str) -> Sequence[int]:
        """Return the media items of a waiting request for which an encoder would have to run."""
        request = self.requests[request_id]
        if not request.mm_features or request.is_stream:
            return ()
        hit = self.kv_cache.find_prefix(request, self._get_max_cached_tokens(request))
        return () if hit.has_media else self._planner.get_missing_items(request, hit.num_tokens)

    def hold(self, request_id: str) -> None:
        """Pass over a waiting request until `release`, or until it is aborted."""
        request = self.requests[request_id]
        self.waiting.remove(request)
        request.status = RequestStatus.HELD
        self.held[request_id] = request

    def release(self, request_id: str) -> None:
        """Put a held request back into the queue, at the place of its arrival."""
        request = self.held.pop(request_id)
        request.status = RequestStatus.WAITING
        self.open_streams.hold_up_others = False  # this one may be able to run
        self._enqueue(request)

    @property
    def has_requests(self) -> bool:
        """Whether a step has something to do: not all are held, or wait for more audio."""
        num_idle = len(self.open_streams) + len(self.held)
        return len(self.requests) > num_idle and not self.open_streams.hold_up_others

    # ---- deciding a step

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, which may mix prefill and decode: they are not separate phases."""
        step = self._fill_step()
        while not step.scheduled and (
            step.is_short_of_blocks
            or step.reserved_for
            or (step.is_encoder_resting and not step.has_waiting)
            or self._long_prompts.is_limiting
        ):
            # The step is empty: it only preempted requests, or reserved tokens for a request that
            # could not use them, or all that is left to do is to encode or to compute long prompts.
            is_idle = not step.is_short_of_blocks and not step.has_waiting
            if step.is_encoder_resting and is_idle:
                self._carryover.end_rest()
            self._long_prompts.lift()
            step = self._fill_step()
        self._long_prompts.end_step(has_tokens=bool(step.scheduled))
        self.open_streams.note_step(is_idle=not step.scheduled and not self.running)
        self._carryover.add_encoded(step, self.limits.max_num_encoder_embeds)
        return self._make_output(step)

    def _fill_step(self) -> Step:
        self._long_prompts.begin_step(self.running, self.waiting)
        self._make_room_for_others()
        self._make_room_for_audio()
        self._long_prompts.choose(self.waiting, num_free_seats=self._num_free_seats)
        step = self._carryover.begin(self.limits, self._can_go_on)
        resting = self._shares.get_resting(self.running)
        for request in [r for r in self.running if r.request_id not in resting]:
            if request.status is RequestStatus.RUNNING:
                self._schedule_running(request, step)
        step.num_reserved_tokens = 0
        while self.waiting and self._can_start(step):
            startable = self._long_prompts.list_startable(
                self.waiting, num_free_seats=self._num_free_seats
            )
            next_request = self._shares.get_next(startable)
            if next_request is None or not self._schedule_waiting(next_request, step):
                break
        self._carryover.take_deferred(step)
        return step

    def _make_room_for_others(self) -> None:
        """Preempt requests of a client call that holds more than its share while others wait."""
        # This precedes filling the step: a request that has work in a step is not preempted in it.
        if not self.waiting:
            return
        entitled = self._long_prompts.get_entitled(self.waiting)
        next_request = self._shares.get_next(self.waiting.iterate_with(entitled))
        if next_request is None:
            return
        is_next_blocked = self._blocked is not None and next_request.rank == self._blocked[0]
        for request in self._shares.get_surplus(
            self.running,
            self.waiting.iterate_with(entitled),
            num_free=0 if is_next_blocked else self._num_free_seats,
        ):
            self._preempt(request)

    def _make_room_for_audio(self) -> None:
        """Preempt requests until a waiting live request has its reserved seat and blocks."""
        first = self.waiting.first
        if first is None or not first.core_request.is_live:
            return
        while self.running and not self.running[-1].core_request.is_live:
            if self._num_free_seats > 0 and self.kv_cache.has_room(first, first.num_ready_tokens):
                return
            self._preempt(self.running[-1])

    def _can_go_on(self, request_id: str) -> bool:
        """Return whether a request runs, or could start now."""
        request = self.requests.get(request_id)
        has_seat = self._num_free_seats > 0
        return request is not None and (request.status is RequestStatus.RUNNING or has_seat)

    @property
    def _num_free_seats(self) -> int:
        return self.limits.max_num_seqs - len(self.running) - len(self.open_streams)

    def _can_start(self, step: Step) -> bool:
        return self._num_free_seats > 0 and step.num_tokens_left > 0 and not step.is_short_of_blocks

    def _schedule_running(self, request: Request, step: Step) -> None:
        if request.request_id == step.reserved_for:
            step.num_reserved_tokens = 0
        if request.num_due_tokens and request.must_wait(self.limits.max_model_len):
            step.has_waiting = True
            return
        if request.is_stream and self.kv_cache.has_passed(request):
            if request.num_scheduled_tokens > request.num_computed_tokens:
                step.has_waiting = True  # its tokens are renumbered after the step under way
                return
            self.open_streams.drop_passed(request)
        start = request.num_scheduled_tokens
        if start % self.kv_cache.block_size and request.is_decoding and step.num_tokens_left:
            # The usual case: one more token, for which the request already has a block.
            step.add_tokens(request, start + 1)
            return
        plan = self._plan(request, start, step)
        if not plan.is_empty:
            block_ids = self._allocate_or_preempt(request, plan.end, step)
            if block_ids is not None:
                self._commit(request, plan, block_ids, step)

    def _schedule_waiting(self, request: Request, step: Step) -> bool:
        # Looking for a prefix takes time in proportion to the prompt. It is not repeated in every
        # step in which the first waiting request finds no room.
        num_releases = self.kv_cache.num_releases + self.encoder_cache.num_releases
        if self._blocked == (request.rank, num_releases):
            return False
        hit = self.kv_cache.find_prefix(request, self._get_max_cached_tokens(request))
        if self._long_prompts.is_long(request, hit.num_tokens) and request not in self.waiting.long:
            # Blocks that were cached when it arrived have been evicted, so its prompt is long now.
            self.waiting.remove(request)
            self.waiting.long.add(request, request.num_tokens - hit.num_tokens)
            return True
        request.has_media = hit.has_media
        is_behind = step.is_encoder_closed
        plan = self._plan(request, hit.num_tokens, step)
        if plan.is_empty and (is_behind or plan.shortage is not Shortage.ENCODER_SPACE):
            return False
        block_ids = None if plan.is_empty else self.kv_cache.allocate(request, plan.end, hit)
        if block_ids is None:
            self._blocked = request.rank, num_releases
            return False
        self._start(request, hit.num_tokens, step)
        self._commit(request, plan, block_ids, step)
        return True

    def _get_max_cached_tokens(self, request: Request) -> int:
        # Prompts of encoder-decoder models are short: only the blocks of their media are reused.
        return 0 if self.limits.is_encoder_decoder else request.max_cached_tokens

    def _start(self, request: Request, num_cached_tokens: int, step: Step) -> None:
        if self._long_prompts.is_long(request, num_cached_tokens):
            self._long_prompts.add(request)
            self.waiting.long.note_start(request, self._num_arrivals - 1)
        self.waiting.remove(request)
        insort(self.running, request, key=_rank_of)
        self._shares.take(request)
        request.status = RequestStatus.RUNNING
        self._num_runs += 1
        request.run = self._num_runs
        request.num_computed_tokens = request.num_scheduled_tokens = num_cached_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
            request.scheduled = self._clock()
            if self.kv_cache.enable_prefix_caching and not self.limits.is_encoder_decoder:
                self.counters.add_lookup(request)
        if request.has_media:
            self.encoder_cache.count_stored(request)
        step.add_started(request)

    def _plan(self, request: Request, start: int, step: Step) -> WindowPlan:
        most = self._long_prompts.get_most(request, start)
        plan = self._planner.get_plan(request, start, step, most)
        if plan.shortage is Shortage.SPAN and not step.is_encoder_closed:
            span = request.get_split_span(start + 1)
            step.deferred = (request.request_id, span[1] - start) if span else None
        if plan.shortage in (Shortage.SPAN, Shortage.ENCODER_SPACE):
            step.is_encoder_closed = True
        if plan.is_empty and plan.shortage is not Shortage.TOKENS:
            self._long_prompts.keep_turn(request)
        return plan

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, step: Step
    ) -> BlockIds | None:
        while (block_ids := self.kv_cache.allocate(request, num_tokens)) is None:
            step.is_short_of_blocks = True
            victim = self.running[-1]  # no request behind `request` has work in this step
            self._preempt(victim)
            if victim is request:
                return None
        return block_ids

    def _preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._set_back(request)

    def _set_back(self, request: Request) -> None:
        """Move a running request to the queue, so that it computes all of its tokens again."""
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.set_back()
        self._enqueue(request)

    def _commit(self, request: Request, plan: WindowPlan, block_ids: BlockIds, step: Step) -> None:
        encoder_inputs = self.encoder_cache.take_items(
            request, to_share=plan.to_share, to_encode=plan.to_encode, duplicates=plan.duplicates
        )
        step.num_encoder_embeds += request.count_embeds(plan.to_encode)
        self._long_prompts.note_tokens(request, plan.end - plan.start)
        step.add_tokens(request, plan.end, block_ids, encoder_inputs)

    def _make_output(self, step: Step) -> SchedulerOutput:
        stopped, self._stopped = tuple(self._stopped), []
        self.counters.num_scheduled_tokens += step.num_tokens
        freed = self.encoder_cache.take_freed_keys()
        return step.make_output(stopped, self.open_streams.take_dropped(), freed)

    # ---- taking the results of a step

    def update_from_output(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Apply the results of a step to its requests, and return the outputs for their clients."""
        for scheduled in output.scheduled:
            if scheduled.encoder_inputs:
                self._note_encoded(scheduled, result)
        outputs: list[EngineCoreOutput] = []
        if result.failed_encodes or result.failed_requests:
            outputs = self._fail_requests(output, result)
        now = self._clock()
        for scheduled in output.scheduled:
            request = self._get_scheduled(scheduled)
            if request is None:
                continue
            is_late = scheduled.request_id in result.late_request_ids
            if request.status is RequestStatus.RUNNING:
                self._advance(request, scheduled, is_late=is_late)
            prompt_logprobs: tuple[TokenLogprobs, ...] = ()
            if request.num_scored_tokens is not None:
                prompt_logprobs = request.take_unscored(
                    result.prompt_logprobs.get(request.request_id, ()),
                    scheduled.num_computed_tokens,
                )
            if scheduled.num_sampled and not is_late:
                outputs.append(self._take_tokens(request, result, prompt_logprobs, now))
            elif prompt_logprobs:
                name = request.request_id
                outputs.append(EngineCoreOutput(request_id=name, prompt_logprobs=prompt_logprobs))
            self._wait_if_idle(request)
        return outputs

    def _wait_if_idle(self, request: Request) -> None:
        if request.is_waiting_for_audio and request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.open_streams.add(request)

    def fail_step(self, output: SchedulerOutput, reason: str) -> list[EngineCoreOutput]:
        """End all requests of a step that failed in the worker, and return their last outputs.

        It is unknown which part of the step the worker has done. So the next plan lists again what
        the worker has to drop, and also the encoder outputs of this step, except what a later step
        uses that is planned already.
        """
        failed = [self._get_scheduled(scheduled) for scheduled in output.scheduled]
        # The worker may not have renumbered the tokens of these requests.
        failed += [self.requests.get(request_id) for request_id, _ in output.dropped_tokens]
        dropped = [*output.freed_encoder_keys]
        for scheduled in output.scheduled:
            for encoder_input in scheduled.encoder_inputs:
                dropped.append(encoder_input.key)
                sharing = sorted(self.encoder_cache.discard(encoder_input.key))
                failed += [self.requests[request_id] for request_id in sharing]
        outputs = [
            self._finish(request, FailedRequestError(reason))
            for request in dict.fromkeys(failed)
            if request is not None and request.status is RequestStatus.RUNNING
        ]
        self.encoder_cache.add_freed_keys(key for key in dropped if key not in self.encoder_cache)
        running = {request.request_id for request in self.running}
        self._stopped[:0] = [name for name in output.stopped_request_ids if name not in running]
        return outputs

    def _get_scheduled(self, scheduled: ScheduledRequest) -> Request | None:
        """Return the request of an entry in a plan, or `None` if it ended or started again."""
        # A request that was preempted since then keeps its run number until it starts again.
        request = self.requests.get(scheduled.request_id)
        return request if request is not None and request.run == scheduled.run else None

    def _note_encoded(self, scheduled: ScheduledRequest, result: ModelRunnerOutput) -> None:
        for encoder_input in scheduled.encoder_inputs:
            if encoder_input.key not in result.failed_encodes:
                self.encoder_cache.mark_computed(encoder_input.key)
        if (request := self._get_scheduled(scheduled)) is not None:
            request.note_encoded(scheduled.encoder_inputs, result)

    def _fail_requests(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """End the requests that failed in a step, and return their last outputs."""
        # A request fails if an item of its media can't be encoded, or if it has no usable result.
        errors: dict[str, RequestError] = {}  # request id -> the first reason
        for key, reason in result.failed_encodes.items():
            for request_id in sorted(self.encoder_cache.discard(key)):
                errors.setdefault(request_id, RequestError(reason))
        for scheduled in output.scheduled:
            error = result.failed_requests.get(scheduled.request_id)
            if error is not None and self._get_scheduled(scheduled) is not None:
                errors.setdefault(scheduled.request_id, error)
        return [
            self._finish(self.requests[request_id], error)
            for request_id, error in errors.items()
            if request_id in self.requests
        ]

    def _advance(self, request: Request, scheduled: ScheduledRequest, *, is_late: bool) -> None:
        """Record which tokens of a request the step has computed."""
        start = scheduled.num_computed_tokens
        end = start + scheduled.num_new_tokens
        request.num_due_tokens -= scheduled.num_sampled
        if is_late:  # no next token could be chosen yet: the last token is computed again later
            span = request.get_split_span(end - 1)
            end = max(start, end - 1 if span is None else span[0])
            request.num_scheduled_tokens = end
        request.num_computed_tokens = end
        if end // self.kv_cache.block_size > start // self.kv_cache.block_size:
            self.kv_cache.commit(request)
        if self.limits.is_encoder_decoder:
            # A request's first step stores the keys and values of its media. If that step counts no
            # token as computed, because the only prompt token is late, it is repeated.
            if not request.has_media and end > 0:
                request.has_media = True
                self.kv_cache.commit_media(request)
                self.encoder_cache.free(request)
        elif start < request.num_prompt_tokens:
            self.encoder_cache.free_passed_items(request, start)

    def _take_tokens(
        self,
        request: Request,
        result: ModelRunnerOutput,
        prompt_logprobs: tuple[TokenLogprobs, ...],
        now: float,
    ) -> EngineCoreOutput:
        """Append the chosen tokens up to the one that ends the request, and return the output."""
        chosen = result.token_ids[request.request_id]
        if len(chosen) > 1 and request.num_due_tokens:
            raise InvariantError(f"{request.request_id} got tokens that another step also chooses")
        is_complete = request.request_id in result.completed_request_ids
        has_become_long = False
        stop: tuple[FinishReason, int | None] | None = None
        num_taken = 0
        while stop is None and num_taken < len(chosen):
            has_become_long |= request.append_token(chosen[num_taken])
            self.counters.add_token(request)
            num_taken += 1
            stop = request.get_stop(
                max_model_len=self.limits.max_model_len,
                is_complete=is_complete and num_taken == len(chosen),
            )
        if request.first_token is None:
            request.first_token = now
        reason, stop_token_id = stop or (None, None)
        if reason:
            self._end(request, reason)
        elif has_become_long and request.status is RequestStatus.RUNNING:
            self._set_back(request)
        return request.make_output(
            reason,
            now,
            stop_token_id=stop_token_id,
            new_token_ids=chosen[:num_taken],
            logprobs=result.logprobs.get(request.request_id, ())[:num_taken],
            prompt_logprobs=prompt_logprobs,
            results=result.results.get(request.request_id, NO_RESULTS),
        )

    def _finish(self, request: Request, error: RequestError | None = None) -> EngineCoreOutput:
        """End a request with `error`, or as aborted if that is `None`; return its last output."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        self._end(request, reason)
        return request.make_output(reason, self._clock(), error=error)

    def _end(self, request: Request, reason: FinishReason) -> None:
        was_held = self.held.pop(request.request_id, None) is not None
        if not self.open_streams.forget(request.request_id) and not was_held:
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
        self._release(request)
        self.waiting.long.forget(request.request_id)
        request.status = RequestStatus.FINISHED
        self.counters.finished[reason] += 1
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        """Free the KV blocks and encoder references of a request, and make the worker drop it."""
        self.kv_cache.free(request.request_id)
        self.encoder_cache.free(request)
        if request.status is RequestStatus.RUNNING:
            self._shares.release(request)
            self._long_prompts.remove(request.request_id)
            self._stopped.append(request.request_id)
