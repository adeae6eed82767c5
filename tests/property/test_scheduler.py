"""Whatever comes in whatever order, the scheduler keeps its promises."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sensorium.core.admission import Limits

from .scheduler_driver import SchedulerDriver
from .strategies import EOS, REQUEST_IDS, CacheSizes, cache_sizes, core_requests, items, limits


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver: SchedulerDriver | None = None

    @initialize(limits=limits(), sizes=cache_sizes(), policy=st.sampled_from(("fcfs", "priority")))
    def build(self, limits: Limits, sizes: CacheSizes, policy: str) -> None:
        self.driver = SchedulerDriver(limits, sizes, policy)

    @property
    def live(self) -> SchedulerDriver:
        assert self.driver is not None
        return self.driver

    @rule(data=st.data(), count=st.integers(1, 3))
    def add(self, data: st.DataObject, count: int) -> None:
        strategy = core_requests(is_encoder_decoder=self.live.limits.is_encoder_decoder)
        for _ in range(count):
            self.live.add(data.draw(strategy))

    @rule(request_id=st.sampled_from(REQUEST_IDS))
    def abort(self, request_id: str) -> None:
        self.live.abort(request_id)

    @rule(tokens=st.lists(st.sampled_from((1, 1, 2, EOS)), min_size=1, max_size=8))
    def run_steps(self, tokens: list[int]) -> None:
        for token_id in tokens:
            self.live.step(token_id)
            self.live.check()

    @rule(failing_hashes=st.sets(items, min_size=1, max_size=3))
    def run_step_with_failing_items(self, failing_hashes: set[str]) -> None:
        output = self.live.schedule()
        self.live.finish_step(output, token_id=1, failing_hashes=failing_hashes)

    @rule(has_run=st.booleans())
    def break_step(self, has_run: bool) -> None:
        self.live.fail_step(self.live.schedule(), has_run=has_run)

    @precondition(lambda self: self.driver is not None and self.driver.open)
    @rule(
        data=st.data(),
        returns=st.booleans(),
        outcome=st.sampled_from(("done", "items failed", "broken")),
    )
    def abort_during_step(self, data: st.DataObject, returns: bool, outcome: str) -> None:
        """The caller leaves, perhaps to come back under the same name, while the worker runs."""
        request_id = data.draw(st.sampled_from(sorted(self.live.open)))
        request = self.live.open[request_id]
        output = self.live.schedule()
        self.live.abort(request_id)
        if returns:
            self.live.add(request)
        self.live.check()
        if outcome == "broken":
            self.live.fail_step(output, has_run=True)
        else:
            hashes = {f.mm_hash for f in request.mm_features} if outcome != "done" else ()
            self.live.finish_step(output, token_id=1, failing_hashes=hashes)

    @rule()
    def clear_caches(self) -> None:
        self.live.kv_cache.clear_cache()
        self.live.encoder_cache.clear_cache()

    @invariant()
    def accounts_agree(self) -> None:
        if self.driver is not None:
            self.driver.check()

    def teardown(self) -> None:
        if self.driver is not None and not self.driver.is_in_step:
            self.driver.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=500,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
