"""A scheduler and a simulated worker, driven step by step, every promise checked on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from sensorium.core.admission import Limits
from sensorium.core.block_pool import NULL_BLOCK
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.scheduler import Scheduler
from sensorium.types.errors import RequestError
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest
from sensorium.types.scheduling import (
    KVCacheGroup,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)
from tests.support import overlap

from .simulated_worker import SimulatedWorker
from .strategies import CacheSizes

_NUM_MEDIA_POSITIONS = 48  # of layers with cross-attention: room for a request with media, or three


def get_spans(request: EngineCoreRequest, limits: Limits) -> list[tuple[int, int]]:
    """Return the ranges that may not be split, found position by position."""
    if limits.is_encoder_decoder:
        return []
    spans: list[tuple[int, int]] = []
    for feature in request.mm_features:
        place = feature.mm_position
        if limits.disable_chunked_mm_input:
            spans.append((place.offset, place.end))
        elif limits.bidirectional_modalities:
            mask = place.is_embed if place.is_embed is not None else (True,) * place.length
            taken = [place.offset + i for i, is_embed in enumerate(mask) if is_embed]
            starts = [p for p in taken if p - 1 not in taken]
            ends = [p + 1 for p in taken if p + 1 not in taken]
            spans.extend(zip(starts, ends, strict=True))
    return spans


def check_blocks(kv_cache: KVCacheManager, request_ids: Iterable[str]) -> None:
    """Check that tables and pools agree on references, and that a block is free or used."""
    held = [Counter[int]() for _ in kv_cache.groups]
    for request_id in request_ids:
        for count, block_ids in zip(held, kv_cache.get_block_ids(request_id), strict=False):
            count.update(block_id for block_id in block_ids if block_id != NULL_BLOCK)
    for count, pool in zip(held, kv_cache._pools, strict=True):
        for block_id in range(1, pool.num_blocks):
            assert pool._num_refs[block_id] == count[block_id]
            assert pool.is_free(block_id) == (count[block_id] == 0)


def check_last(output: EngineCoreOutput) -> None:
    """Check that times are in order, and that each cached item is named once."""
    assert output.times is not None
    times = output.times
    moments = [times.arrived, times.scheduled, times.first_token, times.finished]
    passed = [moment for moment in moments if moment is not None]
    assert passed == sorted(passed)
    hits = output.encoder_hits
    assert len(set(hits)) == len(hits) == output.num_encoder_hits


class SchedulerDriver:
    """Runs steps one by one or, with `is_ahead`, each before the results of the last are known.

    By default it does what engines under test do.
    """

    def __init__(
        self, limits: Limits, sizes: CacheSizes, policy: str, *, is_ahead: bool | None = None
    ) -> None:
        self.limits = limits
        self.is_ahead = overlap.is_on() if is_ahead is None else is_ahead
        # The step with results that the scheduler does not have yet.
        self.under_way: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
        groups = sizes.groups
        if limits.is_encoder_decoder:
            num_blocks = 1 + _NUM_MEDIA_POSITIONS // sizes.block_size
            groups = (*groups, KVCacheGroup(num_blocks=num_blocks, is_cross=True))
        self.kv_cache = KVCacheManager(
            groups,
            block_size=sizes.block_size,
            enable_prefix_caching=sizes.enable_prefix_caching,
        )
        self.encoder_cache = EncoderCacheManager(limits.encoder_cache_size)
        self.scheduler = Scheduler(
            limits, kv_cache=self.kv_cache, encoder_cache=self.encoder_cache, policy=policy
        )
        self.worker = SimulatedWorker(
            groups,
            block_size=sizes.block_size,
            is_encoder_decoder=limits.is_encoder_decoder,
            long_after=limits.long_after,
        )
        self.open: dict[str, EngineCoreRequest] = {}
        self.scored: dict[str, list[int]] = {}  # prompt positions with log-probabilities, as given
        self.is_in_step = False
        # Embeddings beyond the budget that steps without encoding have not made up for.
        self.encoder_debt = 0

    def add(self, request: EngineCoreRequest) -> bool:
        """Add a request, and return whether it was accepted."""
        try:
            self.scheduler.add_request(request)
        except RequestError:
            return False
        assert request.request_id not in self.open
        self.open[request.request_id] = request
        self.scored[request.request_id] = []
        return True

    def add_held(self, request: EngineCoreRequest) -> bool:
        """Add a request as the engine does while it looks for encoder outputs of its media."""
        if not self.add(request):
            return False
        held = self.scheduler.requests[request.request_id]
        missing = self.scheduler.get_missing_items(request.request_id)
        assert list(missing) == sorted(set(missing))
        assert not any(held.get_encoder_key(i) in self.encoder_cache for i in missing)
        self.scheduler.hold(request.request_id)
        return True

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort_request(request_id)
        assert (output is not None) == (request_id in self.open)
        if output is not None:
            self.take([output])

    def take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            assert output.request_id in self.open, "news of a request that has ended"
            self._check_scored(output)
            if output.finish_reason is not None:
                check_last(output)
                del self.open[output.request_id]

    def _check_scored(self, output: EngineCoreOutput) -> None:
        """Check that each prompt token but the first is scored once, in order.

        All of them are scored before the first new token.
        """
        request = self.open[output.request_id]
        scored = self.scored[output.request_id]
        scored.extend(entry.rank for entry in output.prompt_logprobs)
        num_expected = len(scored)
        if output.new_token_ids:
            is_wanted = request.sampling_params.prompt_logprobs is not None
            num_expected = len(request.prompt_token_ids) - 1 if is_wanted else 0
        assert scored == list(range(1, num_expected + 1))

    def schedule(self) -> SchedulerOutput:
        self.is_in_step = True
        first = self.scheduler.running[:1]
        is_answering = any(r.num_computed_tokens >= r.num_prompt_tokens for r in first)
        output = self.scheduler.schedule()
        assert all(r in self.scheduler.running for r in first), "the first one is preempted"
        if self.under_way is None or not self.open:
            has_work = self.open.keys() != self.scheduler.held.keys()
            assert has_work != output.is_empty, "a step does something if there are requests"
        assert not any(s.request_id in self.scheduler.held for s in output.scheduled)
        self._check_unread(output)
        self._check_budgets(output)
        self._check_seats(output)
        self._check_rest(output, is_answering=is_answering)
        return output

    def _check_unread(self, output: SchedulerOutput) -> None:
        """No request runs if its next token depends on one that has not been read."""
        if self.under_way is None:
            return
        unread = {s.run for s in self.under_way[0].scheduled if s.num_sampled}
        for scheduled in output.scheduled:
            params = self.open[scheduled.request_id].sampling_params
            is_free = not params.has_penalties and params.structured_outputs is None
            assert is_free or scheduled.run not in unread

    def _check_rest(self, output: SchedulerOutput, *, is_answering: bool) -> None:
        """After an item beyond the budget, encoders rest while an answer can continue."""
        num_embeds = sum(size for s in output.scheduled for size in self._get_encoder_sizes(s))
        if self.encoder_debt and num_embeds:
            assert not is_answering, "encoders work although they owe the others a step"
            self.encoder_debt = 0
        if self.encoder_debt and is_answering and self.under_way is None:
            assert output.scheduled, "nothing goes on while encoders rest"
        debt = self.encoder_debt + num_embeds - self.limits.max_num_encoder_embeds
        self.encoder_debt = max(0, debt)

    def finish_step(
        self,
        output: SchedulerOutput,
        *,
        token_id: int,
        num_forced: int = 0,
        failing_hashes: Collection[str] = (),
        failing_requests: Collection[str] = (),
    ) -> None:
        result = self.worker.execute(
            output,
            token_id=token_id,
            num_forced=num_forced,
            failing_hashes=failing_hashes,
            failing_requests=failing_requests,
        )
        done = self.under_way if self.is_ahead else (output, result)
        self.under_way = (output, result) if self.is_ahead else None
        if done is not None:
            self.take(self.scheduler.update_from_output(*done))
        self._check_worker()
        self.is_in_step = False

    def _check_worker(self) -> None:
        """Core and worker agree on the cached outputs of encoders, and on their users."""
        for request in self.scheduler.running:
            used = self.worker.rows[request.request_id].get_used_items()
            held = self.encoder_cache.get_cached_input_ids(request)
            assert held >= used if self.is_ahead else held == used
        if self.is_ahead and self.under_way is not None:
            failed = self.under_way[1].failed_encodes.keys()
            assert all(key in self.encoder_cache for key in self.worker.encoded_keys)
            num_missing = sum(key in self.encoder_cache for key in failed)
        else:
            assert all(self.encoder_cache.is_computed(key) for key in self.worker.encoded_keys)
            num_missing = 0
        num_entries = self.encoder_cache.statistics().num_entries
        assert len(self.worker.encoded_keys) == num_entries - num_missing

    def fail_step(self, output: SchedulerOutput, *, has_run: bool) -> None:
        """Let the worker fail before it did anything, or after it did everything."""
        if has_run:
            self.worker.execute(output, token_id=1)
        self._take_under_way()
        self.take(self.scheduler.fail_step(output, "the worker broke down"))
        self.is_in_step = False

    def fail_last_step(self, output: SchedulerOutput) -> None:
        """The worker begins a step, and then it turns out that the one before has failed."""
        result = self.worker.execute(output, token_id=1)
        if self.under_way is not None:
            self.take(self.scheduler.fail_step(self.under_way[0], "the worker broke down"))
        self.under_way = output, result
        if not self.is_ahead:
            self._take_under_way()
        self.is_in_step = False

    def _take_under_way(self) -> None:
        if self.under_way is not None:
            self.take(self.scheduler.update_from_output(*self.under_way))
            self.under_way = None

    def step(self, token_id: int = 1) -> None:
        self.finish_step(self.schedule(), token_id=token_id)

    def drain(self) -> None:
        """Check that all requests end within a bounded number of steps, and hold nothing then."""
        for request_id in list(self.scheduler.held):
            self.scheduler.release(request_id)
        for _ in range(self.get_step_bound()):
            if not self.open:
                break
            self.step()
        assert not self.open, "requests are stuck"
        assert not self.scheduler.has_requests
        self.step()
        self._take_under_way()
        assert not self.worker.rows
        assert all(pool.num_used == 0 for pool in self.kv_cache.statistics())
        statistics = self.encoder_cache.statistics()
        assert statistics.num_references == 0
        assert statistics.num_evictable_embeds == statistics.num_used_embeds
        assert not self.encoder_cache.request_cached_ids

    def get_step_bound(self) -> int:
        """Return the number of steps after which all requests must be done.

        The first request moves at least every second step, and is never set back. One that becomes
        long is set back once: it waits for those that run, and computes everything again. A request
        that waits for its tokens to be read moves in every second step at most. The first of the
        long prompts has every second turn, and others have some steps between two turns.
        """
        num_tokens = sum(self.get_max_tokens(request) for request in self.open.values())
        bound = (4 if self.is_ahead else 2) * num_tokens + 2
        if self.limits.long_prefill_token_threshold:
            bound *= 2 * (1 + self.limits.long_prefill_pause)
        if self.limits.long_after is None:
            return bound
        return 2 * (bound + 2 * self.limits.max_num_seqs * self.limits.max_model_len)

    def get_max_tokens(self, request: EngineCoreRequest) -> int:
        max_tokens = request.sampling_params.max_tokens or self.limits.max_model_len
        return min(len(request.prompt_token_ids) + max_tokens, self.limits.max_model_len)

    def check(self) -> None:
        check_blocks(self.kv_cache, self.open)
        statistics = self.encoder_cache.statistics()
        assert 0 <= statistics.num_evictable_embeds <= statistics.num_used_embeds
        assert statistics.num_used_embeds <= statistics.capacity
        assert set(self.encoder_cache.request_cached_ids) <= set(self.open)
        assert set(self.scheduler.requests) == set(self.open)
        queues = [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.held.values()]
        places = [request.request_id for request in queues]
        places += [name for name in self.open if name in self.scheduler.open_streams]
        assert sorted(places) == sorted(self.open)

    def _check_seats(self, output: SchedulerOutput) -> None:
        """No call keeps more than half of the seats from an urgent request of a smaller call."""
        scheduler = self.scheduler
        share = max(1, self.limits.max_num_seqs // 2)
        held = Counter(request.group for request in scheduler.running)
        entitled = [r for r in scheduler.waiting if held[r.group] < share]
        is_full = len(scheduler.running) == self.limits.max_num_seqs
        if is_full and max(held.values()) > share:
            largest = max(held, key=held.__getitem__)
            urgency = min(r.rank[0] for r in scheduler.running if r.group == largest)
            # A long prompt may have to wait for other long ones.
            short = [r for r in entitled if r not in scheduler.waiting.long]
            assert not [r for r in short if r.rank[0] <= urgency]
        last_started = {
            scheduler.requests[each.request.request_id].group: each.request.request_id
            for each in output.started
        }
        for group, request_id in last_started.items():
            request = scheduler._long_prompts._running.get(request_id)
            if is_full and request is not None and held[group] > share:
                assert not [r for r in entitled if r.rank[0] <= request.rank[0]]

    def _check_budgets(self, output: SchedulerOutput) -> None:
        limits = self.limits
        scheduled = output.scheduled
        assert len({s.request_id for s in scheduled}) == len(scheduled)
        assert len(self.scheduler.running) <= limits.max_num_seqs
        num_tokens = sum(s.num_new_tokens for s in scheduled)
        assert num_tokens == output.num_scheduled_tokens
        windows = [self._check_window(s) for s in scheduled]
        if num_tokens > limits.max_num_batched_tokens:
            spans = get_spans(self.open[scheduled[0].request_id], limits)
            assert len(scheduled) == 1
            assert windows[0] in spans
        sizes = [self._get_encoder_sizes(s) for s in scheduled]
        encoded = [size for s in sizes for size in s]
        if sum(encoded) > limits.max_num_encoder_embeds:
            # An encoder-decoder model needs all its items in the first step.
            assert len([s for s in sizes if s] if limits.is_encoder_decoder else encoded) == 1

    def _check_window(self, scheduled: ScheduledRequest) -> tuple[int, int]:
        start = scheduled.num_computed_tokens
        end = start + scheduled.num_new_tokens
        for span_start, span_end in get_spans(self.open[scheduled.request_id], self.limits):
            assert not span_start < start < span_end
            assert not span_start < end < span_end
        return start, end

    def _get_encoder_sizes(self, scheduled: ScheduledRequest) -> list[int]:
        features = self.open[scheduled.request_id].mm_features
        sizes = [
            features[i.mm_index].mm_position.get_num_embeds() for i in scheduled.encoder_inputs
        ]
        return [size for size in sizes if size > 0]
