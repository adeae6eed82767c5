"""There is one computation per key, however many callers come and go meanwhile."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import pytest

from sensorium.multimodal.single_flight import FinishedFlight, SingleFlight
from sensorium.types.errors import CapacityError, MissingMediaError, RequestError
from tests.support.waiting import wait_until

SOON_S = 60.0


class OpenFlight(Future[Any]):
    """A computation that the test ends."""


class Starter:
    """Counts the flights that it begins, and keeps them."""

    def __init__(self) -> None:
        self.flights: list[OpenFlight] = []
        self.begun = threading.Semaphore(0)

    def __call__(self) -> OpenFlight:
        flight = OpenFlight()
        self.flights.append(flight)
        self.begun.release()
        return flight

    def wait_for_flight(self, index: int) -> OpenFlight:
        """A caller counts as waiting before it has begun its flight."""
        wait_until(lambda: len(self.flights) > index)
        return self.flights[index]


@pytest.fixture
def single_flight() -> SingleFlight[str, Any]:
    return SingleFlight()


@pytest.fixture
def executor() -> Any:
    with ThreadPoolExecutor(32) as executor:
        yield executor


def get_num_entered(single_flight: SingleFlight[str, Any]) -> int:
    """Return how often a caller has started a computation or joined one."""
    return single_flight.num_flights + single_flight.num_joined


def join(
    executor: ThreadPoolExecutor,
    single_flight: SingleFlight[str, Any],
    start: Any,
    *,
    num_callers: int,
    **options: Any,
) -> list[Future[Any]]:
    """Start that many callers, and return when all of them wait."""
    num_waiting = single_flight.num_waiting
    options = {"timeout_s": SOON_S} | options
    futures = [
        executor.submit(single_flight.get, "key", start, **options) for _ in range(num_callers)
    ]
    wait_until(lambda: single_flight.num_waiting == num_waiting + num_callers)
    return futures


def test_callers_of_one_key_share_one_computation(
    single_flight: SingleFlight[str, Any], executor: ThreadPoolExecutor
) -> None:
    starter = Starter()
    futures = join(executor, single_flight, starter, num_callers=20)
    result = object()
    starter.wait_for_flight(0).set_result(result)
    assert all(future.result(SOON_S) is result for future in futures)
    assert len(starter.flights) == 1
    counts = single_flight.num_flights, single_flight.num_joined, single_flight.num_waiting
    assert counts == (1, 19, 0)


def test_other_keys_do_not_wait(single_flight: SingleFlight[str, Any]) -> None:
    def start() -> FinishedFlight:
        return FinishedFlight(single_flight.get("b", lambda: FinishedFlight(2), timeout_s=1.0) + 1)

    assert single_flight.get("a", start, timeout_s=1.0) == 3


def test_a_computation_in_the_first_callers_thread_serves_the_others(
    single_flight: SingleFlight[str, Any], executor: ThreadPoolExecutor
) -> None:
    may_end = threading.Event()
    threads = []

    def start() -> FinishedFlight:
        threads.append(threading.get_ident())
        assert may_end.wait(SOON_S)
        return FinishedFlight("computed")

    futures = join(executor, single_flight, start, num_callers=5)
    may_end.set()
    assert [future.result(SOON_S) for future in futures] == ["computed"] * 5
    assert len(threads) == 1


def test_every_waiter_gets_its_own_copy_of_the_error(
    single_flight: SingleFlight[str, Any], executor: ThreadPoolExecutor
) -> None:
    starter = Starter()
    futures = join(executor, single_flight, starter, num_callers=3)
    starter.wait_for_flight(0).set_exception(MissingMediaError("gone", ("a", "b")))
    errors = [future.exception(SOON_S) for future in futures]
    assert [type(error) for error in errors] == [MissingMediaError] * 3
    assert [(str(error), error.missing) for error in errors] == [("gone", ("a", "b"))] * 3  # type: ignore[union-attr]
    assert len({id(error) for error in errors}) == 3


def test_an_error_at_the_start_reaches_all_and_the_next_caller_starts_again(
    single_flight: SingleFlight[str, Any], executor: ThreadPoolExecutor
) -> None:
    may_end = threading.Event()

    def start() -> FinishedFlight:
        assert may_end.wait(SOON_S)
        raise RequestError("no such thing")

    futures = join(executor, single_flight, start, num_callers=3)
    may_end.set()
    for future in futures:
        with pytest.raises(RequestError, match=r"^no such thing$"):
            future.result(SOON_S)
    assert single_flight.get("key", lambda: FinishedFlight(1), timeout_s=1.0) == 1


def test_an_error_that_can_not_be_copied_is_given_as_it_is(
    single_flight: SingleFlight[str, Any],
) -> None:
    class OddError(Exception):
        def __init__(self, *, reason: str) -> None:
            super().__init__(reason)

    error = OddError(reason="odd")

    def start() -> OpenFlight:
        flight = OpenFlight()
        flight.set_exception(error)
        return flight

    with pytest.raises(OddError) as caught:
        single_flight.get("key", start, timeout_s=1.0)
    assert caught.value is error


@pytest.mark.parametrize("is_within_start", [True, False])
def test_an_error_is_freed_without_the_garbage_collector(
    single_flight: SingleFlight[str, Any], is_within_start: bool
) -> None:
    class WatchedError(RequestError):
        pass

    def start() -> OpenFlight:
        error = WatchedError("no")
        watched.append(weakref.ref(error))
        if is_within_start:
            try:
                raise error
            finally:
                del error
        flight = OpenFlight()
        flight.set_exception(error)
        return flight

    watched: list[weakref.ref[WatchedError]] = []
    gc.disable()
    try:
        with pytest.raises(WatchedError) as caught:
            single_flight.get("key", start, timeout_s=1.0)
        watched.append(weakref.ref(caught.value))
        del caught
        assert [reference() for reference in watched] == [None, None]
    finally:
        gc.enable()


def test_results_are_not_kept(single_flight: SingleFlight[str, Any]) -> None:
    results = [
        single_flight.get("key", lambda number=number: FinishedFlight(number), timeout_s=1.0)
        for number in range(3)
    ]
    assert results == [0, 1, 2]


def test_the_computation_continues_until_the_last_waiter_has_left(
    single_flight: SingleFlight[str, Any], executor: ThreadPoolExecutor
) -> None:
    starter = Starter()
    leaving: list[Future[None]] = [Future() for _ in range(3)]
    futures = [
        join(executor, single_flight, starter, num_callers=1, cancelled=cancelled)[0]
        for cancelled in leaving
    ]
    flight = starter.wait_for_flight(0)
    for cancelled, future in zip(leaving[:2], futures[:2], strict=True):
        cancelled.set_result(None)
        with pytest.raises(CancelledError):
            future.result(SOON_S)
        assert not flight.cancelled()
    leaving[2].cancel()  # a future that is cancelled has completed as well
    with pytest.raises(CancelledError):
        futures[2].result(SOON_S)
    assert flight.cancelled()
    assert starter.flights == [flight]


def test_an_abandoned_computation_is_not_joined(
    single_flight: SingleFlight[str, Any],
) -> None:
    class Unstoppable(OpenFlight):
        def cancel(self) -> bool:
            cancelled.append(self)
            return False

    cancelled: list[Unstoppable] = []
    given_up = Unstoppable()
    with pytest.raises(TimeoutError):
        single_flight.get("key", lambda: given_up, timeout_s=0.01)
    assert cancelled == [given_up]
    assert single_flight.get("key", lambda: FinishedFlight("new"), timeout_s=1.0) == "new"
    given_up.set_result("too late")


def test_a_caller_that_times_out_leaves_the_others_waiting(
    single_flight: SingleFlight[str, Any], executor: ThreadPoolExecutor
) -> None:
    starter = Starter()
    (patient,) = join(executor, single_flight, starter, num_callers=1)
    with pytest.raises(TimeoutError):
        single_flight.get("key", starter, timeout_s=0.02)
    starter.wait_for_flight(0).set_result("late")
    assert patient.result(SOON_S) == "late"


def test_a_cancelled_caller_starts_nothing(
    single_flight: SingleFlight[str, Any],
) -> None:
    starter = Starter()
    cancelled: Future[None] = Future()
    cancelled.set_result(None)
    with pytest.raises(CancelledError):
        single_flight.get("key", starter, timeout_s=1.0, cancelled=cancelled)
    assert starter.flights == []


def test_a_computation_that_another_caller_cancelled_is_started_again(
    single_flight: SingleFlight[str, Any], executor: ThreadPoolExecutor
) -> None:
    starter = Starter()
    futures = join(executor, single_flight, starter, num_callers=4)
    starter.wait_for_flight(0).cancel()
    # One that has not woken yet still waits for the first flight, and would begin a third.
    wait_until(lambda: get_num_entered(single_flight) == 8)
    starter.wait_for_flight(1).set_result("second")
    assert [future.result(SOON_S) for future in futures] == ["second"] * 4
    assert len(starter.flights) == 2


def test_a_computation_that_is_always_cancelled_is_given_up(
    single_flight: SingleFlight[str, Any],
) -> None:
    flights = []

    def start() -> OpenFlight:
        flights.append(OpenFlight())
        flights[-1].cancel()
        return flights[-1]

    with pytest.raises(CapacityError):
        single_flight.get("key", start, timeout_s=SOON_S)
    assert len(flights) == 3


def test_an_interrupt_of_the_computing_thread_does_not_reach_the_others(
    single_flight: SingleFlight[str, Any], executor: ThreadPoolExecutor
) -> None:
    joined = threading.Event()

    def interrupted() -> FinishedFlight:
        assert joined.wait(SOON_S)
        raise KeyboardInterrupt

    def first() -> None:
        with pytest.raises(KeyboardInterrupt):
            single_flight.get("key", interrupted, timeout_s=SOON_S)

    leader = executor.submit(first)
    wait_until(lambda: single_flight.num_waiting == 1)
    (follower,) = join(executor, single_flight, lambda: FinishedFlight("mine"), num_callers=1)
    joined.set()
    assert follower.result(SOON_S) == "mine"
    leader.result(SOON_S)


@pytest.mark.parametrize("seed", range(4))
def test_a_caller_that_comes_while_the_last_one_leaves_gets_its_result(seed: int) -> None:
    """The leaver and the newcomer are let off together, many times."""
    single_flight: SingleFlight[str, Any] = SingleFlight()
    generator = random.Random(seed)
    with ThreadPoolExecutor(3) as executor:
        for _ in range(150):
            starter, cancelled = Starter(), Future[None]()
            leaver = executor.submit(
                single_flight.get, "key", starter, timeout_s=SOON_S, cancelled=cancelled
            )
            assert starter.begun.acquire(timeout=SOON_S)
            barrier = threading.Barrier(2)

            def leave(
                barrier: threading.Barrier = barrier, cancelled: Future[None] = cancelled
            ) -> None:
                barrier.wait(SOON_S)
                cancelled.set_result(None)

            def come(
                barrier: threading.Barrier = barrier,
                starter: Starter = starter,
                pause: int = generator.randrange(300),
            ) -> Any:
                barrier.wait(SOON_S)
                for _ in range(pause):
                    pass
                return single_flight.get("key", starter, timeout_s=SOON_S)

            executor.submit(leave)
            newcomer = executor.submit(come)
            with pytest.raises(CancelledError):
                leaver.result(SOON_S)
            wait_until(lambda: single_flight.num_waiting == 1)
            wait_until(lambda starter=starter: not starter.flights[-1].cancelled())
            starter.flights[-1].set_result("here")
            assert newcomer.result(SOON_S) == "here"


@pytest.mark.parametrize("seed", range(3))
def test_callers_that_stay_get_the_result_of_their_key(seed: int) -> None:
    """Random callers, keys, failures and departures; flights run in threads of their own."""
    single_flight: SingleFlight[int, int] = SingleFlight()
    running: dict[int, int] = {}
    lock = threading.Lock()

    class Sum(OpenFlight):
        """Computes 10 * key, unless it was cancelled; sometimes fails."""

        def __init__(self, key: int, generator: random.Random) -> None:
            super().__init__()
            self.key, self.pause, self.fails = key, generator.random() / 300, key % 5 == 4
            with lock:
                running[key] = running.get(key, 0) + 1
            self.add_done_callback(self.end)
            threads.submit(self.compute)

        def compute(self) -> None:
            time.sleep(self.pause)
            if self.set_running_or_notify_cancel():
                if self.fails:
                    self.set_exception(RequestError(str(self.key)))
                else:
                    self.set_result(10 * self.key)

        def end(self, _: Future[Any]) -> None:
            with lock:
                running[self.key] -= 1

    def call(number: int) -> str:
        generator = random.Random(seed * 1000 + number)
        time.sleep(generator.random() / 100)
        key = generator.randrange(6)
        timeout_s = generator.choice([0.0, 0.001, 0.002, SOON_S])
        try:
            result = single_flight.get(key, lambda: Sum(key, generator), timeout_s=timeout_s)
        except TimeoutError:
            return "left" if timeout_s < SOON_S else "hung"
        except RequestError as error:
            return "failed" if str(error) == str(key) == "4" else "wrong"
        return "served" if result == 10 * key != 40 else "wrong"

    with ThreadPoolExecutor(8) as threads, ThreadPoolExecutor(24) as callers:
        answers = list(callers.map(call, range(250)))
    assert set(answers) == {"left", "failed", "served"}
    assert set(running.values()) == {0}
    assert single_flight.num_waiting == 0
    assert single_flight.num_flights + single_flight.num_joined == 250
    assert single_flight._entries == {}
