"""Looks for encoder outputs in a store before their requests are scheduled, in threads of its own.

A store may be slow, or hang. So no step waits for it: the scheduler holds a request until its
look-ups are answered or a limit of time is over. Outputs that were not found by then are computed.

Owns the look-ups, and the outputs that they found until the core takes these. `begin`, `forget`,
`take_answered` and `wait` are called in the core's thread only.

Invariants:
  1. Each request for which look-ups were begun is returned by `take_answered` once, or forgotten.
  2. There is one look-up of an item at a time, however many requests want it.
  3. Requests take turns: one with many items holds up no other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sensorium.multimodal.tiers.breaker import Breaker

logger = logging.getLogger(__name__)
_NUM_THREADS = 4
_LIMIT_S = 5.0  # how long a request waits for all of its look-ups
_MAX_BYTES = 2**30  # of outputs that were found, and that no request has used yet


class OutputStore(Protocol):
    """A place where encoder outputs are kept, by `mm_hash`."""

    def load_encoded(self, mm_hash: str, num_embeds: int) -> torch.Tensor | None: ...


@dataclass(slots=True)
class _Look:
    """A look-up of one item, for the requests that want it."""

    num_embeds: int
    request_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Waiting:
    """A request that waits, with its open look-ups and the outputs that were found."""

    deadline: float
    token: int  # from the breaker's `enter`
    open: set[str]
    num_answered: int = 0
    found: dict[str, torch.Tensor] = field(default_factory=dict)


class OutputLoader:
    """A loader of encoder outputs for requests that are not scheduled yet.

    If no look-up of a request ends within `limit_s` seconds, the store is left out for a while.
    """

    def __init__(
        self, store: OutputStore, *, num_threads: int = _NUM_THREADS, limit_s: float = _LIMIT_S
    ) -> None:
        self._store = store
        self._limit_s = limit_s
        self._max_threads = num_threads
        self._breaker = Breaker(
            "the look-up of encoder outputs in the media tiers",
            failed="fails",
            advice="Media are encoded instead.",
            back="works again",
        )
        self._changed = threading.Condition()  # guards everything below
        self._threads: list[threading.Thread] = []
        self._requests: OrderedDict[str, _Waiting] = OrderedDict()  # in the order of deadlines
        self._looks: dict[str, _Look] = {}  # mm_hash -> its look-up
        # request id -> items with look-ups that have not begun; requests take turns
        self._queue: OrderedDict[str, deque[str]] = OrderedDict()
        self._answered: dict[str, None] = {}  # requests without an open look-up
        self._num_found_bytes = 0
        self._wake: Callable[[], None] | None = None
        self._is_closed = False

    def listen(self, wake: Callable[[], None] | None) -> None:
        """Set the function to call, in any thread, when a request is answered; None: call none."""
        with self._changed:
            self._wake = wake

    def begin(self, request_id: str, wanted: Mapping[str, int]) -> bool:
        """Begin to look up outputs for a request, and return whether it has to wait for them.

        `wanted` maps the hash of each item to its number of embeddings.
        """
        if not wanted or (token := self._breaker.enter(self._limit_s)) is None:
            return False
        with self._changed:
            if self._is_closed:
                return False
            deadline = time.monotonic() + self._limit_s
            self._requests[request_id] = _Waiting(deadline, token, set(wanted))
            new = [mm_hash for mm_hash in wanted if mm_hash not in self._looks]
            self._looks |= {mm_hash: _Look(wanted[mm_hash]) for mm_hash in new}
            for mm_hash in wanted:
                self._looks[mm_hash].request_ids.add(request_id)
            if new:
                self._queue[request_id] = deque(new)
            while len(self._threads) < min(self._max_threads, len(self._looks)):
                thread = threading.Thread(target=self._run, name="output-loader", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()
        return True

    def forget(self, request_id: str) -> None:
        """Forget a request, and its queued look-ups that no other request wants."""
        if request_id in self._requests:
            with self._changed:
                self._remove(request_id)

    @property
    def has_answers(self) -> bool:
        """Return whether `take_answered` would return a request now."""
        return bool(self._answered) or (self._get_wait_s() or 1.0) <= 0

    @property
    def wait_s(self) -> float | None:
        """Return the most seconds until there is an answer, or None if no request waits."""
        wait_s = self._get_wait_s()
        return None if wait_s is None else max(0.0, wait_s)

    def take_answered(self) -> list[tuple[str, Mapping[str, torch.Tensor]]]:
        """Return the requests that need not wait any more, with the outputs that were found."""
        if not self.has_answers:
            return []
        with self._changed:
            ready, now = list(self._answered), time.monotonic()
            for request_id, waiting in self._requests.items():
                if waiting.deadline > now:
                    break
                if request_id not in self._answered:
                    ready.append(request_id)
                    if not waiting.num_answered:
                        self._breaker.note_failure(waiting.token, "it does not answer in time")
            return [(request_id, self._remove(request_id)) for request_id in ready]

    def wait(self) -> None:
        """Wait until a request is answered, or return at once if no request waits."""
        with self._changed:
            while self._requests and not self.has_answers:
                self._changed.wait(self.wait_s)

    def close(self) -> None:
        """End the threads, each when its look-up has ended, and begin no more look-ups."""
        with self._changed:
            self._is_closed = True
            for request_id in list(self._requests):
                self._remove(request_id)
            self._changed.notify_all()

    def _get_wait_s(self) -> float | None:
        # Only the core's thread, which calls this, adds and removes requests.
        first = next(iter(self._requests.values()), None)
        return None if first is None else first.deadline - time.monotonic()

    def _remove(self, request_id: str) -> dict[str, torch.Tensor]:
        """Remove a request, and return what was found for it."""
        waiting = self._requests.pop(request_id)
        self._answered.pop(request_id, None)
        self._num_found_bytes -= sum(each.nbytes for each in waiting.found.values())
        for mm_hash in waiting.open:
            self._looks[mm_hash].request_ids.discard(request_id)
        for mm_hash in self._queue.pop(request_id, ()):
            if others := self._looks[mm_hash].request_ids:
                self._queue.setdefault(min(others), deque()).append(mm_hash)
            else:
                del self._looks[mm_hash]
        return waiting.found

    def _run(self) -> None:
        while (look := self._take_next()) is not None:
            mm_hash, num_embeds = look
            found = None
            try:
                found = self._store.load_encoded(mm_hash, num_embeds)
            except Exception:  # the thread must outlive every look-up; the item is encoded
                logger.warning("an encoder output could not be looked up", exc_info=True)
            self._note(mm_hash, found)
            del found  # its memory would be held until the next look-up

    def _take_next(self) -> tuple[str, int] | None:
        """Wait for an item to look up, and return it, or None after `close`."""
        with self._changed:
            while not self._is_closed:
                if not self._queue:
                    self._changed.wait()
                    continue
                request_id, hashes = self._queue.popitem(last=False)
                mm_hash = hashes.popleft()
                if hashes:
                    self._queue[request_id] = hashes
                look = self._looks[mm_hash]
                if self._num_found_bytes < _MAX_BYTES:
                    return mm_hash, look.num_embeds
                self._answer(mm_hash, None)
        return None

    def _note(self, mm_hash: str, found: torch.Tensor | None) -> None:
        with self._changed:
            self._answer(mm_hash, found)

    def _answer(self, mm_hash: str, found: torch.Tensor | None) -> None:
        is_any_answered = False
        for request_id in self._looks.pop(mm_hash).request_ids:
            waiting = self._requests[request_id]
            waiting.open.discard(mm_hash)
            waiting.num_answered += 1
            if found is not None:
                waiting.found[mm_hash] = found
                self._num_found_bytes += found.nbytes
            if not waiting.open:
                self._answered[request_id] = None
                self._breaker.note_success(waiting.token)
                is_any_answered = True
        if is_any_answered:
            self._changed.notify_all()
            if self._wake is not None:
                self._wake()
