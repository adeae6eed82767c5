"""The step loop: a failing step, a refused request and an abort leave the engine as good as new."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from sensorium.core.admission import Limits
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.scheduler import Scheduler
from sensorium.engine.core_process.engine_core import EngineCore, PayloadStore
from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.types.errors import ErrorRecord, InvariantError, RequestError
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange, Transfer
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import KVCacheGroup, ModelRunnerOutput, SchedulerOutput


class FakeRunner:
    """Samples token 1 for all requests. On demand it refuses a request or fails in a step."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.steps: list[SchedulerOutput] = []
        self.refusal: Exception | None = None
        self.failure: BaseException | None = None  # of the next launch
        self.late_failure: BaseException | None = None  # of the next results that are read
        self.num_finished = 0
        self.query_failure: BaseException | None = None
        self.is_quick = False  # whether results are there as soon as a step is launched

    def add_request(self, request: EngineCoreRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.known.add(request.request_id)

    def forget_request(self, request_id: str) -> None:
        self.known.discard(request_id)

    def is_done_within(self, _seconds: float, _step: SchedulerOutput) -> bool:
        if self.query_failure is not None:
            failure, self.query_failure = self.query_failure, None
            raise failure
        return self.is_quick

    def launch(self, output: SchedulerOutput) -> SchedulerOutput:
        self.steps.append(output)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return output

    def finish(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.num_finished += 1
        if self.late_failure is not None:
            failure, self.late_failure = self.late_failure, None
            raise failure
        sampled = {s.request_id: (1,) for s in output.scheduled if s.num_sampled}
        return ModelRunnerOutput(token_ids=sampled, logprobs={}, failed_encodes={})


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def core(runner: FakeRunner) -> EngineCore:
    return make_core(runner)


@pytest.fixture
def overlapped(runner: FakeRunner) -> EngineCore:
    """A core that launches each step before it reads the results of the last."""
    return make_core(runner, overlap=True)


def make_core(runner: FakeRunner, *, overlap: bool = False) -> EngineCore:
    scheduler = Scheduler(
        Limits(
            max_model_len=64,
            max_num_batched_tokens=16,
            max_num_seqs=2,
            encoder_cache_size=8,
            max_num_encoder_embeds=8,
        ),
        kv_cache=KVCacheManager([KVCacheGroup(num_blocks=17)], block_size=4),
        encoder_cache=EncoderCacheManager(8),
    )
    return EngineCore(scheduler, runner, PayloadStore(MirrorReceiver()), overlap=overlap)


def make_request(
    request_id: str, *hashes: str, num_tokens: int = 6, max_tokens: int = 2, penalty: float = 0.0
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=(5,) * num_tokens,
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=max_tokens, presence_penalty=penalty
        ),
        mm_features=tuple(
            MultiModalFeatureSpec(
                modality="image", mm_hash=mm_hash, mm_position=PlaceholderRange(2 * index, 2)
            )
            for index, mm_hash in enumerate(hashes)
        ),
    )


def add(core: EngineCore, *requests: EngineCoreRequest) -> None:
    for request in requests:
        payloads = {feature.mm_hash: {} for feature in request.mm_features}
        assert core.add_request(request, Transfer(payloads=payloads)) is None


def run(core: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    """Return all outputs by request, once no request is left."""
    outputs: dict[str, list[EngineCoreOutput]] = {}
    while core.has_requests:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def check_idle(core: EngineCore, runner: FakeRunner) -> None:
    """Check that nothing is left of any request."""
    assert not core.has_requests
    assert len(core.payloads) == 0
    assert runner.known == set()
    assert core.scheduler.encoder_cache.statistics().num_references == 0
    assert not core.scheduler.running
    assert not core.scheduler.waiting


def get_ends(outputs: dict[str, list[EngineCoreOutput]]) -> dict[str, FinishReason | None]:
    """Return the finish reason of each request; it has exactly one, in its last output."""
    for history in outputs.values():
        assert all(output.finish_reason is None for output in history[:-1])
    return {request_id: history[-1].finish_reason for request_id, history in outputs.items()}


def test_every_request_ends_once_and_leaves_nothing(core: EngineCore, runner: FakeRunner) -> None:
    add(core, make_request("a", "x"), make_request("b", "x", "y"), make_request("c"))
    ends = get_ends(run(core))
    assert ends == dict.fromkeys("abc", FinishReason.LENGTH)
    check_idle(core, runner)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), InvariantError("a bug")])
def test_a_failing_step_ends_its_own_requests_and_no_others(
    core: EngineCore, runner: FakeRunner, error: Exception
) -> None:
    add(core, make_request("a", "x"), make_request("b"), make_request("c", "x"))
    runner.failure = error
    outputs = core.step()
    assert {o.request_id: o.finish_reason for o in outputs} == dict.fromkeys(
        "ab", FinishReason.ERROR
    )
    for output in outputs:
        reason = f"internal error: {type(error).__name__}: {error}"
        assert output.error == ErrorRecord(kind="FailedRequestError", message=reason)
    assert set(core.payloads) == {"x"}  # c, which waits, still needs it
    assert runner.known == {"c"}
    assert get_ends(run(core)) == {"c": FinishReason.LENGTH}
    check_idle(core, runner)


def test_what_a_failing_step_was_to_encode_is_encoded_by_the_next_request(
    core: EngineCore, runner: FakeRunner
) -> None:
    add(core, make_request("a", "x"))
    runner.failure = RuntimeError("broken")
    core.step()
    add(core, make_request("b", "x"))
    (output,) = core.step()
    step = runner.steps[-1]
    assert [entry.key for s in step.scheduled for entry in s.encoder_inputs] == ["x"]
    assert step.freed_encoder_keys == ("x",)  # the worker may hold it: how far it came is unknown
    assert "a" in step.stopped_request_ids
    assert (output.request_id, output.num_encoder_hits) == ("b", 0)


@pytest.mark.parametrize("refusal", [RequestError("no positions"), KeyError("a bug")])
def test_a_request_that_the_worker_refuses_leaves_nothing(
    core: EngineCore, runner: FakeRunner, refusal: Exception
) -> None:
    runner.refusal = refusal
    with pytest.raises(type(refusal), match=r"no positions|a bug"):
        add(core, make_request("a", "x"))
    check_idle(core, runner)
    runner.refusal = None
    add(core, make_request("a", "x"))
    assert get_ends(run(core)) == {"a": FinishReason.LENGTH}


def test_a_request_that_the_scheduler_refuses_leaves_nothing(
    core: EngineCore, runner: FakeRunner
) -> None:
    with pytest.raises(RequestError, match="99 tokens"):
        add(core, make_request("a", "x", num_tokens=99))
    check_idle(core, runner)


def test_a_request_with_missing_tensors_is_answered_and_leaves_nothing(
    core: EngineCore, runner: FakeRunner
) -> None:
    missing = core.add_request(make_request("a", "x", "y"), Transfer(payloads={"x": {}}))
    assert missing is not None
    assert missing.mm_hashes == ("y",)
    check_idle(core, runner)


def test_an_id_in_use_is_refused_and_its_owner_continues(
    core: EngineCore, runner: FakeRunner
) -> None:
    add(core, make_request("a", "x"))
    with pytest.raises(RequestError, match="'a' is in use"):
        add(core, make_request("a", "y"))
    assert set(core.payloads) == {"x"}
    assert runner.known == {"a"}
    assert get_ends(run(core)) == {"a": FinishReason.LENGTH}
    add(core, make_request("a"))
    assert get_ends(run(core)) == {"a": FinishReason.LENGTH}


def test_an_abort_ends_running_and_waiting_requests_once(
    core: EngineCore, runner: FakeRunner
) -> None:
    add(core, *(make_request(request_id, "x", max_tokens=9) for request_id in "abc"))
    core.step()
    outputs = core.abort_requests(["a", "c", "unknown"])
    assert [(o.request_id, o.finish_reason) for o in outputs] == [
        ("a", FinishReason.ABORT),
        ("c", FinishReason.ABORT),
    ]
    assert core.abort_requests(["a", "c"]) == []
    assert set(core.payloads) == {"x"}
    assert get_ends(run(core)) == {"b": FinishReason.LENGTH}
    check_idle(core, runner)


def test_requests_that_never_run_are_an_invariant_error(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(core, make_request("a"))
    monkeypatch.setattr(core.scheduler, "schedule", SchedulerOutput)
    for _ in range(8):
        assert core.step() == []
    with pytest.raises(InvariantError, match="none of 1 requests ran in 8 steps"):
        core.step()


def test_an_engine_without_requests_may_step_for_ever(core: EngineCore) -> None:
    for _ in range(20):
        assert core.step() == []


# ---- steps that overlap


def test_a_step_is_launched_before_the_last_one_is_read(
    overlapped: EngineCore, runner: FakeRunner
) -> None:
    add(overlapped, make_request("a", max_tokens=3))
    progress = []
    while overlapped.has_requests:
        tokens = [output.new_token_ids for output in overlapped.step()]
        progress.append((len(runner.steps), runner.num_finished, tokens))
    # The last step is empty: after three tokens there is nothing to compute.
    assert progress == [(1, 0, []), (2, 1, [(1,)]), (3, 2, [(1,)]), (4, 4, [(1,)])]
    check_idle(overlapped, runner)


def test_a_first_token_that_is_there_at_once_is_not_kept_back(
    overlapped: EngineCore, runner: FakeRunner
) -> None:
    runner.is_quick = True
    add(overlapped, make_request("a", max_tokens=3))
    progress = []
    while overlapped.has_requests:
        tokens = [output.new_token_ids for output in overlapped.step()]
        progress.append((len(runner.steps), runner.num_finished, tokens))
    # Only the step with the prompt was finished before the next one was launched.
    assert progress == [(1, 1, [(1,)]), (2, 1, []), (3, 2, [(1,)]), (4, 4, [(1,)])]
    check_idle(overlapped, runner)


def test_requests_that_wait_for_their_tokens_share_steps(
    overlapped: EngineCore, runner: FakeRunner
) -> None:
    # With a penalty the host has to read each token.
    add(overlapped, make_request("a", max_tokens=9, penalty=0.5))
    overlapped.step()
    add(overlapped, make_request("b", max_tokens=9, penalty=0.5))
    run(overlapped)
    sizes = [len(step.scheduled) for step in runner.steps if not step.is_empty]
    assert sizes == [1, *[2] * 8, 1]
    check_idle(overlapped, runner)


def test_few_requests_that_wait_hold_up_no_others(
    overlapped: EngineCore, runner: FakeRunner
) -> None:
    overlapped.scheduler.limits = replace(overlapped.scheduler.limits, max_num_seqs=3)
    add(overlapped, make_request("a", max_tokens=9), make_request("b", max_tokens=9))
    add(overlapped, make_request("c", num_tokens=2, max_tokens=9, penalty=0.5))
    num_unread = []
    for _ in range(5):
        overlapped.step()
        num_unread.append(len(runner.steps) - runner.num_finished)
    assert num_unread == [1] * 5
    run(overlapped)
    check_idle(overlapped, runner)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("CUDA error")])
def test_nothing_is_lost_if_looking_for_a_first_token_fails(
    overlapped: EngineCore, runner: FakeRunner, failure: BaseException
) -> None:
    add(overlapped, make_request("a", max_tokens=2))
    outputs = [*overlapped.step(), *overlapped.step()]
    add(overlapped, make_request("b", max_tokens=2))
    runner.query_failure = failure
    with suppress(KeyboardInterrupt):
        outputs += overlapped.step()
    assert runner.query_failure is None
    while overlapped.has_requests:
        outputs += overlapped.step()
    tokens = {name: [o.new_token_ids for o in outputs if o.request_id == name] for name in "ab"}
    assert tokens == {"a": [(1,), (1,)], "b": [(1,), (1,)]}
    check_idle(overlapped, runner)


def test_overlapped_requests_end_once_and_leave_nothing(
    overlapped: EngineCore, runner: FakeRunner
) -> None:
    add(overlapped, make_request("a", "x"), make_request("b", "x", "y"), make_request("c"))
    assert get_ends(run(overlapped)) == dict.fromkeys("abc", FinishReason.LENGTH)
    check_idle(overlapped, runner)


def test_a_launch_that_fails_takes_no_answer_that_is_complete(
    overlapped: EngineCore, runner: FakeRunner
) -> None:
    add(overlapped, make_request("a", max_tokens=1), make_request("b", max_tokens=5))
    assert overlapped.step() == []
    runner.failure = RuntimeError("out of memory")
    outputs = overlapped.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [
        ("a", FinishReason.LENGTH),
        ("b", None),
        ("b", FinishReason.ERROR),
    ]
    check_idle(overlapped, runner)


def test_results_that_can_not_be_read_end_their_requests_and_no_others(
    overlapped: EngineCore, runner: FakeRunner
) -> None:
    add(overlapped, make_request("a"), make_request("b"))
    assert overlapped.step() == []
    add(overlapped, make_request("c"))  # waits for a seat
    runner.late_failure = RuntimeError("the device is lost")
    outputs = overlapped.step()
    assert {o.request_id: o.finish_reason for o in outputs} == dict.fromkeys(
        "ab", FinishReason.ERROR
    )
    assert get_ends(run(overlapped)) == {"c": FinishReason.LENGTH}
    check_idle(overlapped, runner)


@pytest.mark.parametrize("place", ["failure", "late_failure"])
def test_an_interruption_loses_no_other_step(
    overlapped: EngineCore, runner: FakeRunner, place: str
) -> None:
    add(overlapped, make_request("a", max_tokens=1), make_request("b", max_tokens=5))
    overlapped.step()
    setattr(runner, place, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        overlapped.step()
    ends = get_ends(run(overlapped))
    assert ends == ({"a": FinishReason.LENGTH} if place == "failure" else {})
    check_idle(overlapped, runner)


def test_a_request_that_is_aborted_while_its_step_is_under_way_gets_no_more(
    overlapped: EngineCore, runner: FakeRunner
) -> None:
    add(overlapped, make_request("a", "x", max_tokens=9))
    overlapped.step()
    (output,) = overlapped.abort_requests(["a"])
    assert output.finish_reason is FinishReason.ABORT
    assert overlapped.has_requests  # a step is under way
    assert run(overlapped) == {}
    check_idle(overlapped, runner)
