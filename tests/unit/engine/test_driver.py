"""What a request driver decides, without an engine: what is sent, sent again, aborted, released."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sensorium.engine.driver import ProcessAgain, RequestDriver, Send, advance
from sensorium.engine.inputs.input_processor import ProcessedRequest
from sensorium.engine.inputs.renderer import Prepared
from sensorium.multimodal.cache.interface import ItemHandle
from sensorium.multimodal.pipeline import CachedItem
from sensorium.types.errors import CapacityError, MissingMediaError, RequestError
from sensorium.types.multimodal import (
    MissingItems,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Transfer,
)
from sensorium.types.request import CoreTimes, EngineCoreOutput, EngineCoreRequest, FinishReason
from sensorium.types.sampling import SamplingParams

from .test_output_processor import LetterTokenizer

LOST = MissingItems(mm_hashes=("h",), epoch=1)


class Sender:
    """Counts what is held, as a cache does."""

    def __init__(self) -> None:
        self.held: list[ItemHandle] = []
        self.num_transfers = 0

    def make_item(self, **times: float) -> CachedItem:
        handle = ItemHandle(modality="image", mm_hash="h", layout=None, num_bytes=1, is_hit=True)
        self.held.append(handle)
        return CachedItem(handle=handle, path=("image", 0), times=times)

    def make_transfer(self, handles: Any) -> Transfer:
        assert all(any(held is handle for held in self.held) for handle in handles)
        self.num_transfers += 1
        return Transfer()

    def release(self, handles: Any) -> None:
        for handle in handles:
            (index,) = [i for i, held in enumerate(self.held) if held is handle]
            del self.held[index]


@pytest.fixture
def sender() -> Sender:
    return Sender()


@pytest.fixture
def driver(sender: Sender) -> RequestDriver:
    return RequestDriver(LetterTokenizer(), sender)  # type: ignore[arg-type]


def prepare(sender: Sender, n: int = 1) -> Prepared:
    feature = MultiModalFeatureSpec(
        modality="image", mm_hash="h", mm_position=PlaceholderRange(0, 1)
    )
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=(120,),
        sampling_params=SamplingParams(n=n, seed=1),
        mm_features=(feature,),
    )
    processed = ProcessedRequest(request=request, prompt="x", items=(sender.make_item(fetch=1.0),))
    return Prepared(processed=processed, stages={"render": 2.0})


def send(step: Any) -> str:
    assert isinstance(step, Send)
    step.make_transfer()
    return step.request.request_id


def token(child_id: str, reason: FinishReason | None = None) -> EngineCoreOutput:
    times = CoreTimes(arrived=1e12)
    return EngineCoreOutput(
        request_id=child_id, new_token_ids=(97,), finish_reason=reason, times=times
    )


def test_a_request_that_the_core_takes_releases_its_items_and_ends_with_its_output(
    driver: RequestDriver, sender: Sender
) -> None:
    delivery = driver.start(prepare(sender), group="call")
    step = advance(delivery)
    assert isinstance(step, Send)
    assert step.request.group == "call"
    assert send(step) == "r"
    assert advance(delivery, None) is None
    assert sender.held == []
    progress = driver.process([token("r", FinishReason.LENGTH)])
    (output,) = progress.finished
    assert (list(progress.stopped_ids), list(progress.deliveries)) == ([], [])
    assert output.mm_items[0].times == {"fetch": 1.0}
    assert output.stages["render"] == 2.0
    assert output.stages["transfer"] > 0
    assert driver.outputs.request_ids == ()


def test_an_item_that_the_core_lost_is_processed_and_sent_again(
    driver: RequestDriver, sender: Sender
) -> None:
    delivery = driver.start(prepare(sender))
    send(advance(delivery))
    for number in range(2):  # and lost once more
        step = advance(delivery, LOST)
        assert isinstance(step, ProcessAgain)
        assert send(advance(delivery, sender.make_item(process=float(number)))) == "r"
        assert len(sender.held) == 2  # the first handle and the newest
    assert advance(delivery, None) is None
    assert sender.held == []
    (output,) = driver.process([token("r", FinishReason.LENGTH)]).finished
    assert output.mm_items[0].times == {"process": 1.0}


def test_an_item_that_has_its_tensors_is_sent_again_as_it_is(
    driver: RequestDriver, sender: Sender
) -> None:
    prepared = prepare(sender)
    (item,) = prepared.processed.items
    handle = replace(item.handle, kwargs={})
    sender.held[:] = [handle]
    processed = replace(prepared.processed, items=(replace(item, handle=handle),))
    delivery = driver.start(replace(prepared, processed=processed))
    send(advance(delivery))
    assert send(advance(delivery, LOST)) == "r"
    assert advance(delivery, None) is None
    assert sender.held == []


def test_a_core_that_always_loses_media_is_given_up(driver: RequestDriver, sender: Sender) -> None:
    delivery = driver.start(prepare(sender))
    send(advance(delivery))
    for _ in range(3):
        advance(delivery, LOST)
        send(advance(delivery, sender.make_item()))
    advance(delivery, LOST)
    with pytest.raises(CapacityError, match="lost items of this request 4 times"):
        advance(delivery, sender.make_item())
    assert sender.num_transfers == 4
    assert sender.held == []


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_delivery_that_is_closed_holds_nothing(
    driver: RequestDriver, sender: Sender, num_steps: int
) -> None:
    delivery = driver.start(prepare(sender))
    answers = iter([None, LOST, sender.make_item() if num_steps == 3 else None])
    for _ in range(num_steps):
        advance(delivery, next(answers))
    delivery.close()
    assert sender.held == []


def test_other_completions_start_after_the_first_token_and_hold_the_items_until_then(
    driver: RequestDriver, sender: Sender
) -> None:
    first = driver.start(prepare(sender, n=3))
    assert send(advance(first)) == "r#0"
    assert advance(first, None) is None
    assert len(sender.held) == 1
    ((request_id, rest),) = driver.process([token("r#0")]).deliveries
    assert request_id == "r"
    assert send(advance(rest)) == "r#1"
    assert send(advance(rest, None)) == "r#2"
    assert advance(rest, None) is None
    assert sender.held == []


def test_a_completion_that_cannot_start_fails_the_request_and_aborts_the_running_ones(
    driver: RequestDriver, sender: Sender
) -> None:
    first = driver.start(prepare(sender, n=3))
    send(advance(first))
    advance(first, None)
    ((request_id, rest),) = driver.process([token("r#0")]).deliveries
    send(advance(rest))
    advance(rest, None)  # r#1 runs, r#2 does not start
    rest.close()
    error = MissingMediaError("image 0 is gone", ("h",))
    progress = driver.fail(request_id, error)
    assert list(progress.stopped_ids) == ["r#0", "r#1", "r#2"]
    (output,) = progress.finished
    assert output.error is error
    assert [entry.text for entry in output.outputs] == ["a", "", ""]
    assert {entry.finish_reason for entry in output.outputs} == {FinishReason.ERROR}
    assert driver.outputs.request_ids == ()
    assert sender.held == []


def test_a_failure_that_is_no_fault_of_the_request_becomes_a_request_error(
    driver: RequestDriver, sender: Sender
) -> None:
    driver.start(prepare(sender)).close()
    (output,) = driver.fail("r", CapacityError("full")).finished
    assert type(output.error) is RequestError
    assert str(output.error) == "full"
    assert list(driver.fail("r", CapacityError("again")).finished) == []


def test_an_aborted_request_is_not_sent_again_and_its_other_completions_never_start(
    driver: RequestDriver, sender: Sender
) -> None:
    delivery = driver.start(prepare(sender, n=2))
    send(advance(delivery))
    assert driver.abort(("r",)) == ["r#0", "r#1"]
    assert advance(delivery, replace(LOST, mm_hashes=())) is None
    assert sender.held == []
    assert list(driver.process([token("r#0")]).deliveries) == []
