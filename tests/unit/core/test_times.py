"""The last output of a request has the times at which things happened to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.scheduler import Scheduler
from sensorium.types.request import CoreTimes, EngineCoreOutput, EngineCoreRequest
from sensorium.types.scheduling import KVCacheGroup, ModelRunnerOutput
from tests.property.strategies import make_request

from .building import LIMITS, tokens


class Bench:
    """A scheduler with a clock that is set by hand."""

    def __init__(self, *, num_blocks: int = 101, **changes: int) -> None:
        self.now = 0.0
        limits = replace(LIMITS, **changes)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            limits,
            kv_cache=KVCacheManager([KVCacheGroup(num_blocks=num_blocks)], block_size=1),
            encoder_cache=EncoderCacheManager(limits.encoder_cache_size),
            clock=lambda: self.now,
        )

    def add(self, request: EngineCoreRequest, *, at: float) -> None:
        self.now = at
        self.scheduler.add_request(request)

    def step(
        self, *, begins: float, ends: float, encode_s: float = 0.0, failed: str | None = None
    ) -> dict[str, EngineCoreOutput]:
        self.now = begins
        output = self.scheduler.schedule()
        self.now = ends
        result = ModelRunnerOutput(
            token_ids={s.request_id: (1,) for s in output.scheduled if s.num_sampled},
            logprobs={},
            failed_encodes={} if failed is None else {failed: "odd size"},
            encode_s=encode_s,
        )
        return {n.request_id: n for n in self.scheduler.update_from_output(output, result)}


def test_last_output_says_when_the_request_came_ran_and_ended() -> None:
    bench = Bench()
    bench.add(make_request("r", (1,) * 12, sampling_params=tokens(2)), at=1.0)
    assert bench.step(begins=3.0, ends=4.0) == {}
    assert bench.step(begins=5.0, ends=6.0)["r"].times is None
    assert bench.step(begins=7.0, ends=8.0)["r"].times == CoreTimes(
        arrived=1.0, scheduled=3.0, first_token=6.0, finished=8.0
    )


def test_aborted_request_says_how_far_it_came() -> None:
    bench = Bench()
    bench.add(make_request("r", (1,) * 12), at=1.0)
    bench.add(make_request("waiting", (1,)), at=2.0)
    bench.step(begins=3.0, ends=4.0)
    bench.now = 5.0
    aborted = [bench.scheduler.abort_request(name) for name in ("r", "waiting")]
    assert [output.times for output in aborted if output is not None] == [
        CoreTimes(arrived=1.0, scheduled=3.0, finished=5.0),
        CoreTimes(arrived=2.0, finished=5.0),
    ]


def test_a_request_of_a_broken_step_has_times() -> None:
    bench = Bench()
    bench.add(make_request("r", (1,)), at=1.0)
    bench.now = 2.0
    (failed,) = bench.scheduler.fail_step(bench.scheduler.schedule(), "no memory")
    assert failed.times == CoreTimes(arrived=1.0, scheduled=2.0, finished=2.0)


def test_preempted_request_keeps_the_times_of_its_first_run() -> None:
    bench = Bench(num_blocks=8)
    bench.add(make_request("first", (1,) * 2, sampling_params=tokens(5)), at=0.0)
    bench.add(make_request("second", (2,) * 3, sampling_params=tokens(4)), at=1.0)
    request = bench.scheduler.requests["second"]
    last: dict[str, EngineCoreOutput] = {}
    clock = count(2)
    while bench.scheduler.has_requests:
        last |= bench.step(begins=next(clock), ends=next(clock))
    assert request.num_preemptions
    times = last["second"].times
    assert times is not None
    assert (times.arrived, times.scheduled, times.first_token) == (1.0, 2.0, 3.0)


def test_encoding_time_is_counted_only_for_requests_that_encoded() -> None:
    bench = Bench(max_num_batched_tokens=3)
    bench.add(make_request("r", "three", "two", (1,), sampling_params=tokens(1)), at=0.0)
    bench.step(begins=1.0, ends=2.0, encode_s=0.5)
    bench.add(make_request("text", (2,), sampling_params=tokens(1)), at=2.0)
    news = bench.step(begins=3.0, ends=4.0, encode_s=0.25)
    news |= bench.step(begins=5.0, ends=6.0, encode_s=8.0)
    times = {name: output.times for name, output in news.items()}
    assert {name: t and t.encode_s for name, t in times.items()} == {"r": 0.75, "text": 0.0}


def test_a_request_with_a_failed_item_has_the_encoding_time() -> None:
    bench = Bench()
    bench.add(make_request("r", "three", (1,)), at=0.0)
    times = bench.step(begins=1.0, ends=2.0, encode_s=0.5, failed="three")["r"].times
    assert times is not None
    assert times.encode_s == 0.5


def test_last_output_names_the_items_that_the_encoder_cache_had() -> None:
    bench = Bench(max_num_batched_tokens=30)
    bench.add(make_request("a", "two", (1,), sampling_params=tokens(1)), at=0.0)
    assert bench.step(begins=1.0, ends=2.0)["a"].encoder_hits == ()
    parts = ((9,), "three", (1,), "two", (1,), "three", (1,))
    bench.add(make_request("b", *parts, sampling_params=tokens(1)), at=3.0)
    last = bench.step(begins=4.0, ends=5.0)["b"]
    assert last.encoder_hits == (1, 2)
    assert last.num_encoder_hits == 2
