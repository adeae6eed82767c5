"""Decides which replica of an engine serves a request, so that caches are hit for equal media.

Each process that places requests decides alone, and all decide alike, because a replica's rank for
a key is a hash of both (rendezvous hashing). The first replica in that order is the key's home. If
a replica is added or removed, only the keys that it wins or leaves change their home.

A home may be overloaded. Then its keys spill to the replica where this process placed them last, or
to the next one in the order. The media of a spilled key is processed there once more, and is found
there when the key spills again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from sensorium.utils.lru import LruCache

_MAX_KEYS = 2**16  # with their last placements
_MAX_CALLS = 2**14  # with their first replica
_MAX_PLACES = 4  # of a key, the last one first


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """The load at which a replica's keys go to other replicas.

    A replica is full if it has `max_queue` requests. It is overloaded if it has at least
    `min_queue` requests, and at least `factor` times the average of the others. An average of all
    would not do: with two replicas, it is never less than half of what one has.
    """

    max_queue: int = 256
    min_queue: int = 16
    factor: float = 2.0


class Placement:
    """The placement of requests by keys, and a memory of where keys were placed. Not thread-safe.

    A key stands for what a request may share with other requests: its most expensive media item, or
    the beginning of its text.
    """

    def __init__(self, limits: LoadLimits | None = None) -> None:
        self.num_placed = 0
        self.num_spilled = 0  # requests that did not go to the home of their key
        self._limits = limits or LoadLimits()
        self._places: LruCache[str, tuple[str, ...]] = LruCache(_MAX_KEYS)

    def rank(self, key: str, queues: Mapping[str, int]) -> list[str]:
        """Return all replicas in the order in which they should be tried for a key.

        `queues` has the number of requests of each replica. Overloaded ones come last, the shortest
        queue first. Later ones are tried if the first one is gone or full when the request arrives.
        """
        order = rank_replicas(key, queues)
        preferred = [*order[:1], *self._get_places(key, queues), *order[1:]]
        is_busy = self._find_busy(queues)
        free = [replica for replica in dict.fromkeys(preferred) if not is_busy[replica]]
        busy = sorted((replica for replica in order if is_busy[replica]), key=queues.__getitem__)
        return [*free, *busy]

    def note(self, key: str, replica: str, home: str) -> None:
        """Record which replica a request was sent to, and which replica is the home of its key."""
        self.num_placed += 1
        self.num_spilled += replica != home
        before = self._places.get(key) or ()
        if replica != home or before:
            places = (replica, *(place for place in before if place != replica))
            self._places.put(key, places[:_MAX_PLACES])

    def _get_places(self, key: str, queues: Mapping[str, int]) -> list[str]:
        return [replica for replica in self._places.get(key) or () if replica in queues]

    def _find_busy(self, queues: Mapping[str, int]) -> dict[str, bool]:
        """Return for each replica whether it is overloaded or full."""
        limits, total, num_others = self._limits, sum(queues.values()), len(queues) - 1

        def is_busy(queue: int) -> bool:
            is_long = queue >= limits.min_queue
            is_longer = queue * num_others >= limits.factor * (total - queue)
            return queue >= limits.max_queue or (num_others > 0 and is_long and is_longer)

        return {replica: is_busy(queue) for replica, queue in queues.items()}


def rank_replicas(key: str, replicas: Mapping[str, object]) -> list[str]:
    """Return the replicas in the order of their hashes with a key; the first one is its home."""
    prefix = blake2b(key.encode(), digest_size=8)

    def weigh(replica: str) -> bytes:
        digest = prefix.copy()
        digest.update(b"\0" + replica.encode())
        return digest.digest()

    return sorted(replicas, key=weigh, reverse=True)


class Tally:
    """The counts of a deployment's router in this process, for its metrics."""

    def __init__(self) -> None:
        # The ticket of a call -> the replica that Ray was to try first. A caller finds here which
        # replica has not answered.
        self.tried: LruCache[str, str] = LruCache(_MAX_CALLS)
        self.num_placed = 0
        self.num_spilled = 0  # calls that did not go to the home of their key, because of load
        self.replicas: tuple[str, ...] = ()  # those that live, by Ray's latest report
        self.seconds = 0.0  # that were spent on choosing


_TALLIES: dict[str, Tally] = {}


def get_tally(deployment: str) -> Tally:
    """Return the tally of one of the deployments that this process may call."""
    return _TALLIES.setdefault(deployment, Tally())
