"""Look-ups of encoder outputs: once for all who want them, in turns, and never for too long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch

from sensorium.engine.core_process import output_loader as tested
from sensorium.engine.core_process.output_loader import OutputLoader
from tests.support.waiting import wait_until

LONG_S = 600.0


class GatedStore:
    """A store that answers when its gate is open, or to those that it lets through."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: list[str] = []
        self.missing: set[str] = set()
        self.broken: set[str] = set()

    def load_encoded(self, mm_hash: str, num_embeds: int) -> torch.Tensor | None:
        self.asked.append(mm_hash)
        assert self.gate.wait(120)
        if mm_hash in self.broken:
            raise OSError("no such disk")
        return None if mm_hash in self.missing else torch.zeros(num_embeds, 2)


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
def loader(store: GatedStore) -> Iterator[OutputLoader]:
    loader = OutputLoader(store, limit_s=LONG_S)
    yield loader
    store.gate.set()
    loader.close()


def take(loader: OutputLoader, num_requests: int = 1) -> dict[str, dict[str, int]]:
    """Wait for answers, and return request -> item -> number of embeddings found."""
    taken: dict[str, dict[str, int]] = {}
    while len(taken) < num_requests:
        loader.wait()
        for request_id, found in loader.take_answered():
            assert request_id not in taken
            taken[request_id] = {mm_hash: len(each) for mm_hash, each in found.items()}
    return taken


def count_threads() -> int:
    return sum(each.name == "output-loader" for each in threading.enumerate())


def test_a_request_waits_for_all_of_its_items(loader: OutputLoader, store: GatedStore) -> None:
    store.missing, store.broken = {"b"}, {"c"}
    assert not loader.begin("none", {})
    assert loader.begin("first", {"a": 3, "b": 1, "c": 1, "d": 2})
    assert loader.take_answered() == []
    assert not loader.has_answers
    store.gate.set()
    assert take(loader) == {"first": {"a": 3, "d": 2}}
    assert loader.wait_s is None
    assert loader.take_answered() == []


def test_an_item_is_looked_up_once_for_all_who_want_it(
    loader: OutputLoader, store: GatedStore
) -> None:
    for name in ("first", "second", "third"):
        assert loader.begin(name, {"a": 1, "b": 1})
    loader.forget("first")
    store.gate.set()
    assert take(loader, 2) == {name: {"a": 1, "b": 1} for name in ("second", "third")}
    assert sorted(store.asked) == ["a", "b"]
    assert loader.begin("later", {"a": 1})
    take(loader)
    assert sorted(store.asked) == ["a", "a", "b"]


def test_one_request_with_very_many_items_holds_up_no_other(
    loader: OutputLoader, store: GatedStore
) -> None:
    num_threads = count_threads()
    assert loader.begin("large", {f"large {i}": 1 for i in range(32_768)})
    assert loader.begin("small", {"small": 1})
    assert loader.begin("another", {"another": 1, "large 32767": 1})
    assert count_threads() - num_threads <= 4
    wait_until(lambda: len(store.asked) == 4, "all threads have something to do")
    store.gate.set()
    wait_until(
        lambda: {"small", "another"} <= {*store.asked}, "the small requests have their turns"
    )
    assert store.asked.index("small") < 20
    assert store.asked.index("another") < 20
    answers = take(loader, 3)
    assert answers["small"] == {"small": 1}
    assert len(answers["large"]) == 32_768
    assert len(store.asked) == 32_770, "what two requests want is looked up once"


def test_abandoned_items_are_not_looked_up(loader: OutputLoader, store: GatedStore) -> None:
    loader.begin("first", {f"{i}": 1 for i in range(1000)})
    wait_until(lambda: len(store.asked) == 4, "all threads have something to do")
    loader.forget("first")
    loader.forget("first")
    loader.forget("unknown")
    assert loader.wait_s is None
    store.gate.set()
    loader.begin("first", {"new": 2})
    assert take(loader) == {"first": {"new": 2}}
    assert len(store.asked) == 5


def test_a_store_that_does_not_answer_gets_no_calls_until_it_does(
    store: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loader = OutputLoader(store, limit_s=0.05)
    assert loader.begin("first", {f"{i}": 1 for i in range(8)})
    assert take(loader) == {"first": {}}
    assert "does not answer in time" in caplog.text
    assert not loader.begin("second", {"a": 1}), "no request waits for it now"
    assert len(store.asked) == 4
    store.gate.set()

    def is_back() -> bool:
        return loader.begin("again", {"b": 1}) and take(loader) == {"again": {"b": 1}}

    wait_until(is_back, "it is asked again")
    assert "works again" in caplog.text
    loader.close()


def test_no_more_is_loaded_than_there_is_memory_for(
    loader: OutputLoader, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tested, "_MAX_BYTES", 1000)
    store.gate.set()
    loader.begin("large", {f"{i}": 25 for i in range(100)})  # 200 bytes each
    (found,) = take(loader).values()
    assert 5 <= len(found) <= 5 + 4
    loader.begin("small", {"a": 1})
    assert take(loader) == {"small": {"a": 1}}, "what was taken counts no more"


def test_answers_wake_the_listener(loader: OutputLoader, store: GatedStore) -> None:
    notified = threading.Event()
    loader.listen(notified.set)
    loader.begin("first", {"a": 1})
    assert not notified.is_set()
    store.gate.set()
    assert notified.wait(30)
    assert loader.has_answers
    loader.listen(None)


def test_a_closed_loader_starts_nothing_and_its_threads_end(store: GatedStore) -> None:
    num_threads = count_threads()
    loader = OutputLoader(store, limit_s=LONG_S)
    loader.begin("first", {f"{i}": 1 for i in range(10)})
    loader.close()
    store.gate.set()
    assert not loader.begin("second", {"a": 1})
    assert loader.take_answered() == []
    wait_until(lambda: count_threads() <= num_threads, "its threads have ended")
