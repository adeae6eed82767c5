"""Work that pauses is run to its end, or closed."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

import sensorium.utils.pausing as pausing_module
from sensorium.utils.pausing import Pausing, run_through, when_all_end


def test_paused_work_continues_after_each_awaited_future() -> None:
    futures: list[Future[int]] = [Future(), Future()]

    def work() -> Pausing[int]:
        yield futures[0]
        yield futures[1]
        return sum(future.result() for future in futures)

    for value, future in enumerate(futures, start=1):
        threading.Timer(0.01, future.set_result, [value]).start()
    assert run_through(work()) == 3


def test_work_that_needs_no_waiting_is_run_at_once() -> None:
    def work() -> Pausing[str]:
        yield from ()
        return "done"

    assert run_through(work()) == "done"


def test_an_interruption_of_the_wait_closes_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def work() -> Pausing[None]:
        try:
            yield Future()
        finally:
            ended.append("closed")

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pausing_module, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_through(work())
    assert ended == ["closed"]


def test_all_futures_have_ended_when_the_last_one_has() -> None:
    futures: list[Future[int]] = [Future(), Future(), Future()]
    all_ended = when_all_end(futures)
    futures[1].cancel()
    futures[2].set_exception(ValueError())
    assert not all_ended.done()
    futures[0].set_result(1)
    assert all_ended.done()
    assert when_all_end([]).done()
    assert when_all_end(futures).done()
