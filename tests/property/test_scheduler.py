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

    @initialize(
        limits=limits(),
        sizes=cache_sizes(),
        policy=st.sampled_from(("fcfs", "priority")),
    )
    def build(self, limits: Limits, sizes: CacheSizes, policy: str) -> None:
        self.driver = SchedulerDriver(limits, sizes, policy)

    @property
    def live(self) -> SchedulerDriver:
        assert self.driver is not None
        return self.driver

    @rule(data=st.data(), count=st.integers(2, 4))
    def add(self, data: st.DataObject, count: int) -> None:
        free_ids = [i for i in REQUEST_IDS if i not in self.live.open]
        for request_id in free_ids[:count]:
            strategy = core_requests(
                request_ids=st.just(request_id),
                groups=(None, None, "call", "other call"),
                is_encoder_decoder=self.live.limits.is_encoder_decoder,
            )
            is_held = data.draw(st.sampled_from((False, False, True)))
            add = self.live.add_held if is_held else self.live.add
            add(data.draw(strategy))

    @precondition(lambda self: self.driver is not None and self.driver.scheduler.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.live.scheduler.release(data.draw(st.sampled_from(sorted(self.live.scheduler.held))))

    @rule(tokens=st.lists(st.sampled_from((1, 1, 1, 2, EOS)), min_size=1, max_size=8))
    def run_steps(self, tokens: list[int]) -> None:
        for token_id in tokens:
            self.live.step(token_id)
            self.live.check()

    @precondition(lambda self: self.driver is not None and self.driver.open)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(
            ("done", "items fail", "requests fail", "broken before", "broken after", "last broken")
        ),
        departure=st.sampled_from(("nobody", "before", "during", "during, and back again")),
    )
    def run_step_with_trouble(self, data: st.DataObject, outcome: str, departure: str) -> None:
        """A caller may leave, and come back under the same name while the worker still runs."""
        request_id = data.draw(st.sampled_from(sorted(self.live.open)))
        request = self.live.open[request_id]
        if departure == "before":
            self.live.abort(request_id)
        output = self.live.schedule()
        if departure.startswith("during"):
            self.live.abort(request_id)
        if departure.endswith("back again"):
            self.live.add(request)
        self.live.check()
        if outcome == "last broken":
            self.live.fail_last_step(output)
        elif outcome.startswith("broken"):
            self.live.fail_step(output, has_run=outcome == "broken after")
        else:
            failing = data.draw(st.sets(items, max_size=3)) if outcome == "items fail" else ()
            names = st.sets(st.sampled_from(REQUEST_IDS), max_size=2)
            left_out = data.draw(names) if outcome == "requests fail" else ()
            self.live.finish_step(
                output,
                token_id=1,
                num_forced=data.draw(st.integers(0, 3)),
                failing_hashes=failing,
                failing_requests=left_out,
            )

    @rule(request_id=st.sampled_from(REQUEST_IDS))
    def abort_and_clear_caches(self, request_id: str) -> None:
        self.live.abort(request_id)
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
    max_examples=250,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
