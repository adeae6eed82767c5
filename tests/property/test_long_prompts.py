"""Long prompts and others share the steps, and each waits only for as long as was promised."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import count

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sensorium.core.admission import Limits
from sensorium.core.long_queue import LongQueue
from sensorium.core.request import Request
from sensorium.core.waiting_queue import WaitingQueue
from sensorium.types.scheduling import KVCacheGroup, SchedulerOutput
from tests.unit.core.building import tokens

from .scheduler_driver import SchedulerDriver
from .strategies import CacheSizes, make_request

thorough = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
MAX_MODEL_LEN = 400
TARGET = "target"


def make_driver(budget: int, threshold: int, pause: int, *, num_seats: int = 64) -> SchedulerDriver:
    """With room for everything but tokens and seats, and results that are read at once."""
    limits = Limits(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=budget,
        max_num_seqs=num_seats,
        encoder_cache_size=20,
        max_num_encoder_embeds=20,
        long_prefill_token_threshold=threshold,
        long_prefill_pause=pause,
    )
    sizes = CacheSizes(block_size=1, groups=(KVCacheGroup(num_blocks=40_000),))
    return SchedulerDriver(limits, sizes, "fcfs", is_ahead=False)


def add(driver: SchedulerDriver, name: str, num_tokens: int, max_tokens: int = 1) -> None:
    """Add a request that shares its prefix with no other."""
    params = tokens(max_tokens)
    request = make_request(name, (1,) * num_tokens, cache_salt=name, sampling_params=params)
    assert driver.add(request)


def step(driver: SchedulerDriver) -> SchedulerOutput:
    output = driver.schedule()
    driver.finish_step(output, token_id=1)
    return output


def list_pieces(output: SchedulerOutput) -> list[int]:
    """Return how many tokens each of the long prompts, which have such names, has in a step.

    The last token of a prompt that is computed alone is as a token of an answer, and no piece.
    """
    entries = [s for s in output.scheduled if s.request_id.startswith("long")]
    return [s.num_new_tokens for s in entries if s.num_new_tokens > 1 or not s.num_sampled]


@settings(thorough, max_examples=100)
@given(
    budget=st.integers(4, 24),
    threshold=st.integers(1, 24),
    pause=st.integers(0, 4),
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    arrivals=st.lists(st.integers(0, 3), min_size=1, max_size=40),
)
@example(4, 2, 0, [7, 1], [0, 0, 2])  # the last token of one in a step with a piece of another
def test_new_requests_have_their_first_token_in_the_next_step(
    budget: int, threshold: int, pause: int, lengths: list[int], arrivals: list[int]
) -> None:
    """However many long prompts there are, half of a step is for those that are not long.

    One that has a single token left counts as such.
    """
    driver = make_driver(budget, threshold, pause)
    for index, length in enumerate(lengths):
        add(driver, f"long {index}", threshold + length)
    numbers = count()
    for num_new in arrivals:
        names = [f"short {next(numbers)}" for _ in range(min(num_new, budget // 2))]
        for name in names:
            add(driver, name, 1)
        output = step(driver)
        pieces = list_pieces(output)
        if names:
            assert sum(pieces) <= max(1, min(threshold, budget // 2))
        sampled = {s.request_id for s in output.scheduled if s.num_sampled}
        num_last = len(sampled.difference(names))
        assert len(sampled.intersection(names)) >= min(len(names), budget - sum(pieces) - num_last)
    driver.drain()


@settings(thorough, max_examples=100)
@given(
    budget=st.integers(6, 24),
    threshold=st.integers(1, 24),
    pause=st.integers(0, 4),
    num_before=st.integers(0, 4),
    length=st.integers(1, 60),
    later=st.lists(st.integers(1, 60), min_size=1, max_size=3),
)
def test_a_long_prompt_ends_in_time_however_many_come_after_it(
    budget: int, threshold: int, pause: int, num_before: int, length: int, later: list[int]
) -> None:
    """Others of all lengths are always there, and each of them comes after it."""
    driver = make_driver(budget, threshold, pause)
    for index in range(num_before):
        add(driver, f"reader {index}", 1, max_tokens=MAX_MODEL_LEN - 2)
    step(driver)
    add(driver, TARGET, threshold + length)
    least = max(1, min(threshold // 8, budget // 2, budget - num_before))
    num_turns = -(-(threshold + length) // least)
    # It has every second turn. In the first step it may find that one pauses.
    bound = pause + 2 * num_turns * (1 + pause)
    numbers = count()
    for _ in range(bound):
        waiting = {request.request_id for request in driver.scheduler.waiting}
        for num_tokens in (1, *(threshold + extra for extra in later)):
            if not any(name.startswith(f"new {num_tokens} ") for name in waiting):
                add(driver, f"new {num_tokens} {next(numbers)}", num_tokens)
        step(driver)
        if TARGET not in driver.open:
            return
    raise AssertionError("it starves")


@settings(thorough, max_examples=100)
@given(
    num_seats=st.integers(1, 5),
    budget=st.sampled_from((8, 16, 32)),
    threshold=st.sampled_from((4, 8, 16)),
    pause=st.integers(0, 4),
    length=st.integers(1, 60),
    later=st.lists(st.integers(1, 13), min_size=1, max_size=2),
    num_short=st.integers(0, 3),
    num_answered=st.integers(1, 5),
)
@example(2, 16, 16, 1, 44, [7], 0, 5)  # the turns would fall into step with the seats
def test_a_long_prompt_finds_a_seat_however_many_come_after_it(
    num_seats: int,
    budget: int,
    threshold: int,
    pause: int,
    length: int,
    later: list[int],
    num_short: int,
    num_answered: int,
) -> None:
    driver = make_driver(budget, threshold, pause, num_seats=num_seats)
    sizes = [*(threshold + extra for extra in later), *(1,) * num_short]
    for index in range(num_seats):
        add(driver, f"before {index}", sizes[index % len(sizes)], num_answered)
    step(driver)
    add(driver, TARGET, threshold + length)
    least = max(1, threshold // 8)
    num_turns = -(-(threshold + length) // least) - num_seats * (-max(sizes) // least)
    numbers = count()
    for _ in range(20 + 4 * (num_turns + num_answered) * (1 + pause)):
        while len(driver.open) < 12:
            number = next(numbers)
            add(driver, f"new {number}", sizes[number % len(sizes)], num_answered)
        step(driver)
        if TARGET not in driver.open:
            return
    raise AssertionError("it starves")


@settings(thorough, max_examples=100)
@given(
    budget=st.integers(4, 24),
    threshold=st.integers(1, 8),
    pause=st.integers(0, 5),
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    num_steps=st.integers(5, 60),
)
@example(4, 1, 0, [3, 2], 5)  # one token is a piece
def test_decoding_continues_between_the_pieces_of_long_prompts(
    budget: int, threshold: int, pause: int, lengths: list[int], num_steps: int
) -> None:
    driver = make_driver(budget, threshold, pause)
    add(driver, "reader", 1, max_tokens=MAX_MODEL_LEN - 2)
    step(driver)
    for index, length in enumerate(lengths):
        add(driver, f"long {index}", threshold + length)
    num_between: int | None = None
    num_owed = pause
    for _ in range(num_steps):
        output = step(driver)
        assert "reader" in {s.request_id for s in output.scheduled}
        pieces = list_pieces(output)
        if not pieces:
            num_between = None if num_between is None else num_between + 1
            continue
        assert num_between in (None, num_owed)
        num_between, num_owed = 0, min(pause, -(-pause * sum(pieces) // threshold))
    driver.drain()


@settings(thorough, max_examples=100)
@given(
    threshold=st.integers(1, 16),
    arrivals=st.lists(st.lists(st.integers(1, 350), max_size=2), min_size=1, max_size=15),
)
def test_few_long_prompts_run_at_a_time(threshold: int, arrivals: list[list[int]]) -> None:
    """The first one, and then each has at most half of what the others have left."""
    driver = make_driver(16, threshold, 0)
    numbers = count()
    for lengths in arrivals:
        for length in lengths:
            add(driver, f"long {next(numbers)}", threshold + length)
        step(driver)
        assert len(driver.scheduler.running) <= 1 + (MAX_MODEL_LEN // threshold).bit_length()
    driver.drain()


class LongQueueMachine(RuleBasedStateMachine):
    """The queue of long prompts against lists that are sorted anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = LongQueue()
        self.waiting: dict[str, tuple[Request, int]] = {}  # with their lengths
        self.running: dict[str, Request] = {}
        self.places: dict[str, tuple[int, int, int]] = {}  # of those that have started
        self.last_starts: dict[str, tuple[int, int]] = {}
        self.num_come = 0
        self.num_starts = 0

    @rule(priority=st.integers(0, 2), num_tokens=st.integers(1, 5), group=st.sampled_from("abcd"))
    def add(self, priority: int, num_tokens: int, group: str) -> None:
        request = Request(
            make_request(f"r{self.num_come}", (1,), group=group),
            rank=(priority, self.num_come),
            block_size=4,
        )
        self.num_come += 1
        self.queue.add(request, num_tokens)
        self.waiting[request.request_id] = request, num_tokens

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        request, _ = self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]
        self.places[request.request_id] = self.get_order(request)
        self.num_starts += 1
        self.last_starts[request.group] = self.num_come - 1, self.num_starts
        self.queue.note_start(request, self.num_come - 1)
        self.take_out(request)
        self.running[request.request_id] = request

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def preempt(self, data: st.DataObject, num_tokens: int) -> None:
        request = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.queue.add(request, num_tokens)
        self.waiting[request.request_id] = request, num_tokens

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def end_waiting(self, data: st.DataObject) -> None:
        request, _ = self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]
        self.take_out(request)
        self.queue.forget(request.request_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_running(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        self.queue.forget(name)

    def take_out(self, request: Request) -> None:
        self.queue.remove(request)
        del self.waiting[request.request_id]
        if all(other.group != request.group for other, _ in self.waiting.values()):
            self.last_starts.pop(request.group, None)  # whatever comes now has come later

    def get_order(self, request: Request) -> tuple[int, int, int]:
        priority, arrival = request.rank
        place = max((arrival, 0), self.last_starts.get(request.group, (0, 0)))
        return self.places.get(request.request_id, (priority, *place))

    @invariant()
    def agrees(self) -> None:
        waiting = sorted(self.waiting.values(), key=lambda entry: entry[0].rank)
        assert list(self.queue) == [request for request, _ in waiting]
        assert len(self.queue) == len(waiting)
        firsts: dict[str, Request] = {}
        shortest: dict[str, tuple[Request, int]] = {}
        for request, length in waiting:
            assert request in self.queue
            assert self.queue.get_length(request) == length
            assert self.queue.get_order(request) == self.get_order(request)
            firsts.setdefault(request.group, request)
            other, least = shortest.get(request.group, (request, length))
            is_better = (request.rank[0], length) < (other.rank[0], least)
            shortest[request.group] = (request, length) if is_better else (other, least)
        assert not any(request in self.queue for request in self.running.values())
        assert list(self.queue.firsts) == sorted(firsts.values(), key=self.get_order)

        def get_key(entry: tuple[Request, int]) -> tuple[int, ...]:
            priority, *place = self.get_order(entry[0])
            return priority, entry[1], *place

        expected = sorted(shortest.values(), key=get_key)
        assert list(self.queue.shortest) == [request for request, _ in expected]


TestLongQueueMachine = LongQueueMachine.TestCase
TestLongQueueMachine.settings = settings(max_examples=100, deadline=None)


class WaitingQueueMachine(RuleBasedStateMachine):
    """The queue against two sorted lists."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.short: list[tuple[int, int]] = []
        self.long: list[tuple[tuple[int, int], int]] = []  # ranks and lengths
        self.requests: dict[tuple[int, int], Request] = {}
        self.arrivals = count()

    def make(self, priority: int) -> Request:
        rank = priority, next(self.arrivals)
        request = Request(make_request(f"r{rank[1]}", (1,)), rank=rank, block_size=4)
        self.requests[rank] = request
        return request

    @rule(priority=st.integers(0, 2))
    def add(self, priority: int) -> None:
        request = self.make(priority)
        self.queue.add(request)
        insort(self.short, request.rank)

    @rule(priority=st.integers(0, 2), num_tokens=st.integers(1, 5))
    def add_long(self, priority: int, num_tokens: int) -> None:
        request = self.make(priority)
        self.queue.long.add(request, num_tokens)
        insort(self.long, (request.rank, num_tokens))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.requests)))
        self.queue.remove(self.requests.pop(rank))
        self.short = [each for each in self.short if each != rank]
        self.long = [(each, length) for each, length in self.long if each != rank]

    @invariant()
    def agrees(self) -> None:
        ranks = sorted([*self.short, *(rank for rank, _ in self.long)])
        assert list(self.get_ranks(iter(self.queue))) == ranks
        assert len(self.queue) == len(ranks)
        assert self.queue.first is (self.requests[ranks[0]] if ranks else None)
        assert list(self.get_ranks(self.queue.iterate_with(None))) == self.short
        first = self.queue.first_short
        assert first is (self.requests[self.short[0]] if self.short else None)
        longs = [(length, self.requests[rank]) for rank, length in self.long]
        for length, request in longs:
            assert request in self.queue.long
            assert self.queue.long.get_length(request) == length
            with_one = sorted([*self.short, request.rank])
            assert list(self.get_ranks(self.queue.iterate_with(request))) == with_one

    @staticmethod
    def get_ranks(requests: Iterator[Request]) -> Iterator[tuple[int, int]]:
        return (request.rank for request in requests)


TestWaitingQueueMachine = WaitingQueueMachine.TestCase
TestWaitingQueueMachine.settings = settings(max_examples=100, deadline=None)
