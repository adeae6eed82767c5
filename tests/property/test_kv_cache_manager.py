"""The KV accounting, with the content of every block: nothing is read that isn't the reader's."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sensorium.core.admission import Limits, get_unsplittable_spans
from sensorium.core.block_pool import NULL_BLOCK
from sensorium.core.kv_cache_manager import KVCacheManager, PrefixHit
from sensorium.core.request import Request
from sensorium.types.errors import RequestError
from sensorium.types.request import EngineCoreRequest
from sensorium.types.scheduling import (
    BlockIds,
    ScheduledRequest,
    SchedulerOutput,
    StartedRequest,
)

from .scheduler_driver import check_blocks
from .simulated_worker import SimulatedWorker
from .strategies import CacheSizes, cache_sizes, core_requests

MAX_CHUNK = 9
LIMITS = Limits(
    max_model_len=100,
    max_num_batched_tokens=MAX_CHUNK,
    max_num_seqs=8,
    encoder_cache_size=100,
    max_num_encoder_embeds=100,
    bidirectional_modalities=frozenset({"image"}),
)


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(sizes=cache_sizes())
    def build(self, sizes: CacheSizes) -> None:
        self.cache = KVCacheManager(
            sizes.groups,
            block_size=sizes.block_size,
            enable_prefix_caching=sizes.enable_prefix_caching,
        )
        self.worker = SimulatedWorker(sizes.groups, block_size=sizes.block_size)
        self.requests: dict[str, Request] = {}
        self.stopped: list[str] = []
        self.num_started = 0

    @rule(core_request=core_requests(), has_spans=st.booleans(), chunk=st.integers(1, MAX_CHUNK))
    def start(self, core_request: EngineCoreRequest, has_spans: bool, chunk: int) -> None:
        if core_request.request_id in self.requests:
            return
        try:
            spans = get_unsplittable_spans(core_request.mm_features, LIMITS) if has_spans else ()
        except RequestError:
            spans = ()
        request = Request(
            core_request,
            rank=(0, self.num_started),
            block_size=self.cache.block_size,
            spans=spans,
        )
        self.num_started += 1
        hit = self.find_prefix(request)
        end = min(request.num_tokens, hit.num_tokens + chunk)
        block_ids = self.allocate(request, hit.num_tokens, end, hit)
        if block_ids is None:
            return
        self.requests[request.request_id] = request
        request.num_computed_tokens = hit.num_tokens
        self.run(request, end, block_ids, is_new=True)
        self.cache.commit(request)

    def find_prefix(self, request: Request) -> PrefixHit:
        before = self.cache.statistics()
        hit = self.cache.find_prefix(request, request.num_tokens - 1)
        assert self.cache.statistics() == before
        num_blocks = (request.num_tokens - 1) // self.cache.block_size
        candidates = range(num_blocks + 1) if self.cache.enable_prefix_caching else (0,)
        longest = max(n for n in candidates if self.is_prefix(request, n))
        assert hit.num_tokens == longest * self.cache.block_size
        return hit

    def is_prefix(self, request: Request, num_blocks: int) -> bool:
        """Return whether all blocks that a position after `num_blocks` blocks reads are cached."""
        size = self.cache.block_size
        end = num_blocks * size
        if any(span_start < end < span_end for span_start, span_end in request.spans):
            return False
        for group, pool in zip(self.cache.groups, self.cache._pools, strict=True):
            first = 0 if group.window is None else max(0, end - group.window + 1)
            needed = {position // size for position in range(first, end)}
            if any(pool.get_cached(request.block_hash(index)) is None for index in needed):
                return False
        return True

    def allocate(
        self, request: Request, start: int, end: int, hit: PrefixHit | None = None
    ) -> BlockIds | None:
        before = self.cache.get_block_ids(request.request_id)
        block_ids = self.cache.allocate(request, end, hit)
        if block_ids is None:
            after = self.cache.get_block_ids(request.request_id)
            assert [len(b) for b in after] == [len(b) for b in before]
            # Alone it would have been given them.
            others = [r for r in self.requests if r != request.request_id]
            assert others or not self.cache.can_ever_fit(end, end - start)
            return None
        self.check_windows(request, start, end)
        return block_ids

    def check_windows(self, request: Request, start: int, end: int) -> None:
        """Check that blocks outside of every window are not kept."""
        tables = self.cache.get_block_ids(request.request_id)
        for group, block_ids in zip(self.cache.groups, tables, strict=True):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            num_null = first // self.cache.block_size
            assert all(block_id == NULL_BLOCK for block_id in block_ids[:num_null])
            assert all(block_id != NULL_BLOCK for block_id in block_ids[num_null:])
            assert len(block_ids) == -(-end // self.cache.block_size)

    def run(self, request: Request, end: int, block_ids: BlockIds, *, is_new: bool) -> None:
        """Write and read, as the worker would."""
        core_request = request.core_request
        keys = (request.get_encoder_key(i) for i in range(len(request.mm_features)))
        self.worker.encoded_keys.update(keys)
        outputs = request.output_token_ids
        started = (StartedRequest(request=core_request, output_token_ids=outputs),)
        scheduled = ScheduledRequest(
            request_id=request.request_id,
            num_computed_tokens=request.num_computed_tokens,
            num_new_tokens=end - request.num_computed_tokens,
            new_block_ids=block_ids,
            num_sampled=int(end == request.num_tokens),
        )
        output = SchedulerOutput(
            scheduled=(scheduled,),
            started=started if is_new else (),
            stopped_request_ids=tuple(self.stopped),
        )
        self.stopped.clear()
        result = self.worker.execute(output, token_id=1 + end % 2)
        request.num_computed_tokens = end
        for (token_id,) in result.token_ids.values():
            request.append_token(token_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), chunks=st.lists(st.integers(1, MAX_CHUNK), min_size=1, max_size=5))
    def advance(self, data: st.DataObject, chunks: list[int]) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        for chunk in chunks:
            start = request.num_computed_tokens
            end = min(request.num_tokens, start + chunk)
            block_ids = self.allocate(request, start, end)
            if block_ids is not None:
                self.run(request, end, block_ids, is_new=False)
                self.cache.commit(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), chunk=st.integers(1, MAX_CHUNK), has_run=st.booleans())
    def leave(self, data: st.DataObject, chunk: int, has_run: bool) -> None:
        """A request ends, perhaps with a step that is never committed."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        end = min(request.num_tokens, request.num_computed_tokens + chunk)
        block_ids = self.cache.allocate(request, end) if has_run else None
        if block_ids is not None:
            self.run(request, end, block_ids, is_new=False)
        self.cache.free(request.request_id)
        self.cache.free(request.request_id)
        del self.requests[request.request_id]
        self.stopped.append(request.request_id)

    @rule()
    def clear_cache(self) -> None:
        self.cache.clear_cache()

    @invariant()
    def tables_and_pools_agree(self) -> None:
        check_blocks(self.cache, self.requests)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for request_id in self.requests:
            self.cache.free(request_id)
        assert all(pool.num_used == 0 for pool in self.cache.statistics())


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
