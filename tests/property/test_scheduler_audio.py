"""The scheduler keeps its promises to requests with audio, whole or streaming."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sensorium.core import kv_cache_manager
from sensorium.core.admission import Limits
from sensorium.core.request import RequestStatus
from sensorium.types.errors import CapacityError
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason, StreamSpec
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import KVCacheGroup, SchedulerOutput

from .scheduler_driver import SchedulerDriver
from .simulated_worker import Row, SimulatedWorker
from .strategies import EOS, MAX_MODEL_LEN, REQUEST_IDS, CacheSizes

WINDOWS: tuple[tuple[int | None, ...], ...] = ((3,), (5,), (2, 6), (9, 4), (5, None), (None,))


def make_request(
    request_id: str, num_prompt: int, params: SamplingParams, *, num_received: int = 0
) -> EngineCoreRequest:
    """Return a request with audio of `num_received` positions, streaming if that is 0."""
    position = PlaceholderRange(0, num_received)
    feature = MultiModalFeatureSpec(modality="audio", mm_hash=request_id, mm_position=position)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=(1,) * num_prompt,
        sampling_params=params,
        mm_features=(feature,) if num_received else (),
        eos_token_ids=(EOS,),
        stream=StreamSpec(num_delay_tokens=1, num_received=num_received, is_open=not num_received),
    )


class AudioWorker(SimulatedWorker):
    """A worker that forgets tokens, and that has a part of the audio at every position."""

    def __init__(self, *args: Any, num_received: dict[str, int], **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_received = num_received
        self._num_dropped: dict[str, int] = {}

    def _drop_and_start(self, output: SchedulerOutput) -> None:
        for request_id, count in output.dropped_tokens:
            row = self.rows[request_id]
            assert 0 < count <= row.num_computed_tokens
            del row.token_ids[:count]
            del row.names[:count]
            row.num_computed_tokens -= count
            for table in row.tables:
                del table[: count // self._block_size]
            self._num_dropped[request_id] += count
        super()._drop_and_start(output)
        for started in output.started:
            name, stream = started.request.request_id, started.request.stream
            assert stream is not None
            assert not (stream.is_open and started.output_token_ids), "its audio is gone"
            self._num_dropped[name] = 0
            self.rows[name].embed_at = {}
        for scheduled in output.scheduled:
            end = scheduled.num_computed_tokens + scheduled.num_new_tokens
            assert (
                self._num_dropped[scheduled.request_id] + end
                <= self._num_received[scheduled.request_id]
            )

    def _get_name(self, row: Row, position: int) -> int:
        request_id = row.request.request_id
        while len(row.names) <= position + 1:
            place = len(row.names) - 1
            audio = request_id, self._num_dropped[request_id] + place
            row.names.append(self._contents.get_next(row.names[-1], row.token_ids[place], audio))
        return row.names[position + 1]


class AudioDriver(SchedulerDriver):
    def __init__(self, limits: Limits, sizes: CacheSizes, *, is_ahead: bool) -> None:
        super().__init__(limits, sizes, "fcfs", is_ahead=is_ahead)
        self.num_received: dict[str, int] = {}  # request id -> positions of its audio so far
        self.num_tokens: dict[str, int] = {}  # request id -> its prompt and what came back
        self.worker = AudioWorker(
            sizes.groups, block_size=sizes.block_size, num_received=self.num_received
        )

    def add(self, request: EngineCoreRequest) -> bool:
        try:
            is_added = super().add(request)
        except CapacityError:
            return False
        if is_added and request.stream is not None:
            self.num_received[request.request_id] = request.stream.num_received
            self.num_tokens[request.request_id] = len(request.prompt_token_ids)
        return is_added

    def list_open(self) -> list[str]:
        """Return the requests with audio that still streams."""
        return [name for name, request in self.scheduler.requests.items() if request.is_open]

    def append(self, request_id: str, count: int, *, is_last: bool) -> None:
        request = self.scheduler.requests.get(request_id)
        if request is not None and request.is_open:
            self.num_received[request_id] += count
        output = self.scheduler.append_audio(request_id, count, is_last=is_last)
        if output is not None:
            self.take([output])

    def take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            name = output.request_id
            self.num_tokens[name] += len(output.new_token_ids)
            request, num_received = self.open[name], self.num_received[name]
            most = max(num_received, len(request.prompt_token_ids)) + 1
            assert self.num_tokens[name] <= most
            if output.finish_reason is FinishReason.STOP and EOS not in output.new_token_ids:
                assert self.num_tokens[name] >= num_received, "it ends before its audio"
        super().take(outputs)

    def schedule(self) -> SchedulerOutput:
        scheduler = self.scheduler
        self.is_in_step, had_requests = True, scheduler.has_requests
        output = scheduler.schedule()
        for request in scheduler.requests.values():
            stream = request.core_request.stream
            if stream is not None and stream.is_open and request.run:
                assert request.status is RequestStatus.RUNNING, "a live sound is preempted"
        if self.under_way is None:
            assert had_requests or output.is_empty
            assert output.scheduled or not scheduler.has_requests, "a step does nothing"
        self._check_unread(output)
        self._check_budgets(output)
        running = [r for r in scheduler.requests.values() if r.status is RequestStatus.RUNNING]
        assert len(running) <= self.limits.max_num_seqs
        return output

    def check(self) -> None:
        super().check()
        live = {r.request_id for r in self.open.values() if r.stream and r.stream.is_open}
        assert self.scheduler.open_streams._open == live == self.kv_cache._reserved.keys()
        for index, pool in enumerate(self.kv_cache._pools):
            reserved = sum(counts[index] for counts in self.kv_cache._reserved.values())
            assert reserved <= 0.75 * pool.capacity

    def get_max_tokens(self, request: EngineCoreRequest) -> int:
        return max(self.num_received[request.request_id], MAX_MODEL_LEN)

    def drain(self) -> None:
        for request_id in sorted(self.open):
            self.append(request_id, 2, is_last=True)
        super().drain()
        assert not self.scheduler.open_streams._open
        assert not self.kv_cache._reserved


class AudioMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver: AudioDriver | None = None

    @initialize(
        data=st.data(),
        block_size=st.integers(1, 4),
        windows=st.sampled_from(WINDOWS),
        max_num_seqs=st.integers(1, 3),
        max_num_batched_tokens=st.integers(2, 48),
        is_ahead=st.booleans(),
    )
    def build(
        self,
        data: st.DataObject,
        block_size: int,
        windows: tuple[int | None, ...],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        is_ahead: bool,
    ) -> None:
        groups = tuple(
            KVCacheGroup(
                num_blocks=1 + data.draw(st.sampled_from((24, 40, 60))) // block_size,
                window=window,
            )
            for window in windows
        )
        limits = Limits(
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            encoder_cache_size=8,
            max_num_encoder_embeds=8,
        )
        sizes = CacheSizes(block_size=block_size, groups=groups)
        self.driver = AudioDriver(limits, sizes, is_ahead=is_ahead)

    @property
    def live(self) -> AudioDriver:
        assert self.driver is not None
        return self.driver

    @rule(data=st.data(), count=st.integers(2, 5))
    def add(self, data: st.DataObject, count: int) -> None:
        free_ids = [i for i in REQUEST_IDS if i not in self.live.open]
        for request_id in free_ids[:count]:
            num_prompt = data.draw(st.integers(1, 8))
            num_more = data.draw(st.sampled_from((0, 0, 1, 30, 70)))  # 0: it is open
            params = SamplingParams(
                max_tokens=data.draw(st.sampled_from((None, None, None, 1, 12))),
                presence_penalty=data.draw(st.sampled_from((0.0, 0.0, 0.5))),
            )
            num_received = num_prompt + num_more if num_more else 0
            self.live.add(make_request(request_id, num_prompt, params, num_received=num_received))

    @precondition(lambda self: self.driver is not None and self.driver.list_open())
    @rule(data=st.data(), count=st.integers(0, 12), is_last=st.sampled_from((False, False, True)))
    def append(self, data: st.DataObject, count: int, is_last: bool) -> None:
        request_id = data.draw(st.sampled_from(self.live.list_open()))
        self.live.append(request_id, count, is_last=is_last)

    @rule(tokens=st.lists(st.sampled_from((1,) * 12 + (EOS,)), min_size=1, max_size=20))
    def run_steps(self, tokens: list[int]) -> None:
        for token_id in (*tokens, *(1,) * (4 * len(tokens))):
            self.live.step(token_id)
            self.live.check()

    @rule(request_id=st.sampled_from(REQUEST_IDS))
    def abort(self, request_id: str) -> None:
        self.live.abort(request_id)

    @precondition(lambda self: self.driver is not None and self.driver.open)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(
            ("done", "requests fail", "broken before", "broken after", "last broken")
        ),
        departs=st.booleans(),
        count=st.integers(0, 3),
    )
    def run_step_with_trouble(
        self, data: st.DataObject, outcome: str, departs: bool, count: int
    ) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live.open)))
        output = self.live.schedule()
        if departs:
            self.live.abort(request_id)
        elif count:
            self.live.append(request_id, count, is_last=count == 1)
        if outcome == "last broken":
            self.live.fail_last_step(output)
        elif outcome.startswith("broken"):
            self.live.fail_step(output, has_run=outcome == "broken after")
        else:
            failing: Collection[str] = (request_id,) if outcome == "requests fail" else ()
            self.live.finish_step(output, token_id=1, failing_requests=failing)

    @invariant()
    def accounts_agree(self) -> None:
        if self.driver is not None:
            self.driver.check()

    def teardown(self) -> None:
        if self.driver is not None and not self.driver.is_in_step:
            self.driver.drain()


TestAudioMachine = pytest.mark.usefixtures("few_dropped")(AudioMachine.TestCase)
TestAudioMachine.settings = settings(
    max_examples=250,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.usefixtures("few_dropped")
def test_a_request_forgets_tokens_in_a_step_that_fails_without_it() -> None:
    """It is unknown whether the worker has renumbered its tokens, so it fails with the step."""
    limits = Limits(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=2,
        max_num_seqs=3,
        encoder_cache_size=8,
        max_num_encoder_embeds=8,
    )
    sizes = CacheSizes(block_size=1, groups=(KVCacheGroup(num_blocks=61, window=3),))
    driver = AudioDriver(limits, sizes, is_ahead=False)
    params = SamplingParams(max_tokens=None)
    for request_id in ("r0", "r1"):
        driver.add(make_request(request_id, 1, params))
        driver.append(request_id, 1, is_last=False)
        driver.step()
    driver.add(make_request("whole", 1, params, num_received=30))
    driver.step()
    while not driver.kv_cache.has_passed(driver.scheduler.requests["whole"]):
        driver.step()
    driver.append("r0", 5, is_last=False)
    driver.append("r1", 5, is_last=False)
    output = driver.schedule()
    assert [request_id for request_id, _ in output.dropped_tokens] == ["whole"]
    assert "whole" not in {scheduled.request_id for scheduled in output.scheduled}
    driver.fail_step(output, has_run=False)
    assert "whole" not in driver.open
    driver.drain()


@pytest.fixture
def few_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests forget tokens after a few blocks, as they do in life after many."""
    monkeypatch.setattr(kv_cache_manager, "_MIN_DROPPED", 2)
