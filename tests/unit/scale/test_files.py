"""A file that did not come is asked for, also by a call that waited for another one."""

from __future__ import annotations

import threading

import pytest

from sensorium.multimodal.media import DeferredBytes
from sensorium.multimodal.single_flight import FinishedFlight, Flight, SingleFlight
from sensorium.scale.replica import _Files, _LackingFileError


def test_a_call_that_joins_one_without_the_file_reports_the_missing_file() -> None:
    flights: SingleFlight[str, bytes] = SingleFlight()
    looking, has_joined = threading.Event(), threading.Event()
    mine: set[str] = set()
    others: set[str] = set()

    def start_without() -> Flight:
        looking.set()
        has_joined.wait(30)  # as a look into a disk cache takes its time
        return FinishedFlight(DeferredBytes("d", _Files({}, {}, others).open("d")).data)

    def start_with() -> Flight:
        return FinishedFlight(DeferredBytes("d", _Files({"d": b"x"}, {}, mine).open("d")).data)

    def run_first() -> None:
        with pytest.raises(_LackingFileError):
            flights.get("item", start_without, timeout_s=120)

    first = threading.Thread(target=run_first)
    first.start()
    looking.wait(30)
    waiter = flights.join("item", start_with)
    has_joined.set()
    with pytest.raises(_LackingFileError) as raised:
        waiter.result(timeout_s=120)
    waiter.leave()
    first.join()
    assert raised.value.missing == ("d",)
    assert (mine, others) == (set(), {"d"})
