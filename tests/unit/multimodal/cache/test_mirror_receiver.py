from __future__ import annotations

import pytest
import torch

from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import MirrorUpdate, MissingItems, Transfer

from .item_building import get_kept_sizes, is_same, make_kwargs

EPOCH = 5


def make_transfer(
    sequence: int,
    *payloads: str,
    inserts: tuple[str, ...] | None = None,
    evictions: tuple[str, ...] = (),
    epoch: int = EPOCH,
) -> Transfer:
    update = MirrorUpdate(
        epoch=epoch,
        sequence=sequence,
        inserts=payloads if inserts is None else inserts,
        evictions=evictions,
    )
    return Transfer(payloads={key: make_kwargs(key) for key in payloads}, update=update)


def make_receiver(*kept: str) -> MirrorReceiver:
    """Return a receiver that has applied one message."""
    receiver = MirrorReceiver(EPOCH)
    assert isinstance(receiver.receive(kept, make_transfer(0, *kept)), dict)
    return receiver


def test_a_kept_item_needs_no_payload() -> None:
    receiver = make_receiver("a", "b")
    received = receiver.receive(["b", "b"], make_transfer(1))
    assert isinstance(received, dict)
    assert is_same(received["b"], make_kwargs("b"))
    statistics = receiver.statistics()
    assert (statistics.num_queries, statistics.num_hits) == (3, 1)
    assert (statistics.num_items, statistics.num_bytes) == (2, 256)


def test_a_payload_that_is_no_insert_serves_its_request_only() -> None:
    receiver = MirrorReceiver(EPOCH)
    received = receiver.receive(["a"], make_transfer(0, "a", inserts=()))
    assert isinstance(received, dict)
    assert is_same(received["a"], make_kwargs("a"))
    missing = receiver.receive(["a"], make_transfer(1))
    assert missing == MissingItems(mm_hashes=("a",), epoch=EPOCH, num_applied=2)


def test_evictions_come_before_inserts() -> None:
    receiver = make_receiver("a", "b")
    receiver.receive(["a"], make_transfer(1, "a", evictions=("a", "b")))
    assert get_kept_sizes(receiver) == {"a": 128}
    assert receiver.statistics().num_evictions == 2


def test_a_request_keeps_what_is_evicted_after_it() -> None:
    receiver = make_receiver("a")
    received = receiver.receive(["a"], make_transfer(1))
    assert isinstance(receiver.receive([], make_transfer(2, evictions=("a",))), dict)
    assert isinstance(received, dict)
    assert is_same(received["a"], make_kwargs("a"))
    assert receiver.statistics().num_bytes == 0


def test_a_missing_item_is_named_and_the_message_is_still_applied() -> None:
    receiver = make_receiver("a")
    answer = receiver.receive(["a", "x", "b", "x"], make_transfer(1, "b"))
    assert answer == MissingItems(mm_hashes=("x",), epoch=EPOCH, num_applied=2)
    assert get_kept_sizes(receiver) == {"a": 128, "b": 128}
    assert isinstance(receiver.receive(["b"], make_transfer(2)), dict)
    assert receiver.statistics().num_resends == 1


def test_a_wrong_epoch_before_the_first_message_is_answered_with_the_right_one() -> None:
    receiver = MirrorReceiver(EPOCH)
    for _ in range(3):
        answer = receiver.receive(["a"], make_transfer(4, "a", epoch=1))
        assert answer == MissingItems(mm_hashes=("a",), epoch=EPOCH)
    assert get_kept_sizes(receiver) == {}
    assert isinstance(receiver.receive(["a"], make_transfer(0, "a")), dict)


def test_a_new_leader_finds_an_empty_cache_after_one_answer() -> None:
    receiver = make_receiver("a")
    answer = receiver.receive(["a"], make_transfer(0, "a", epoch=0))
    assert isinstance(answer, MissingItems)
    assert answer.epoch == receiver.epoch != EPOCH
    assert answer.num_applied == 0
    assert get_kept_sizes(receiver) == {}
    assert receiver.statistics().num_bytes == 0
    assert isinstance(receiver.receive(["a"], make_transfer(0, "a", epoch=answer.epoch)), dict)


@pytest.mark.parametrize("sequence", [0, 2], ids=["twice", "lost"])
def test_a_message_out_of_order_starts_one_new_epoch(sequence: int) -> None:
    receiver = make_receiver("a")
    answers = [receiver.receive(["a"], make_transfer(sequence + n)) for n in range(3)]
    assert answers[0] == MissingItems(mm_hashes=("a",), epoch=receiver.epoch)
    assert answers == [answers[0]] * 3
    assert receiver.epoch != EPOCH
    assert get_kept_sizes(receiver) == {}


def test_the_loss_of_the_first_message_is_noticed() -> None:
    receiver = MirrorReceiver(EPOCH)
    assert isinstance(receiver.receive([], make_transfer(1)), MissingItems)
    assert receiver.epoch != EPOCH


def test_a_cleared_cache_is_a_new_epoch() -> None:
    receiver = make_receiver("a")
    receiver.clear_cache()
    assert receiver.epoch != EPOCH
    answer = receiver.receive(["a"], make_transfer(1))
    assert answer == MissingItems(mm_hashes=("a",), epoch=receiver.epoch)


def test_epochs_differ_and_are_never_the_unknown_one() -> None:
    epochs = {MirrorReceiver().epoch for _ in range(50)}
    assert len(epochs) == 50
    assert all(0 < epoch < 2**63 for epoch in epochs)


def test_a_message_that_keeps_what_it_does_not_bring_is_a_bug_and_changes_nothing() -> None:
    receiver = make_receiver("a")
    with pytest.raises(InvariantError):
        receiver.receive(["b"], make_transfer(1, inserts=("b",), evictions=("a",)))
    assert get_kept_sizes(receiver) == {"a": 128}
    assert isinstance(receiver.receive(["a"], make_transfer(1)), dict)


def test_a_transfer_without_an_update_is_resolved_only() -> None:
    receiver = make_receiver("a")
    received = receiver.receive(["a", "b"], Transfer(payloads={"b": make_kwargs("b")}))
    assert isinstance(received, dict)
    assert received.keys() == {"a", "b"}
    assert get_kept_sizes(receiver) == {"a": 128}
    assert isinstance(receiver.receive([], make_transfer(1)), dict)


def test_a_part_of_a_larger_tensor_is_copied_before_it_is_kept() -> None:
    receiver = MirrorReceiver(EPOCH)
    whole = torch.arange(64.0)
    update = MirrorUpdate(epoch=EPOCH, sequence=0, inserts=("a",))
    receiver.receive(["a"], Transfer(payloads={"a": {"x": whole[16:32]}}, update=update))
    received = receiver.receive(["a"], make_transfer(1))
    assert isinstance(received, dict)
    assert torch.equal(received["a"]["x"], whole[16:32])
    assert received["a"]["x"].untyped_storage().nbytes() == 64
