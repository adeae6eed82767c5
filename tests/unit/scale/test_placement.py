"""Placement of requests: alike in all processes, little moved by changes, and no overload."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.scale.placement import LoadLimits, Placement, rank_replicas

KEYS = [f"key {number}" for number in range(2000)]
names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True)


def get_homes(replicas: list[str]) -> dict[str, str]:
    return {key: rank_replicas(key, dict.fromkeys(replicas))[0] for key in KEYS}


def test_the_order_is_fixed_for_ever() -> None:
    """Processes of different versions may place requests at the same time."""
    assert rank_replicas("a", dict.fromkeys(["r1", "r2", "r3"])) == ["r2", "r1", "r3"]
    assert rank_replicas("ü", dict.fromkeys(["r1", "r2", "r3"])) == ["r3", "r2", "r1"]


@given(names, st.text(max_size=20))
def test_every_process_ranks_alike(replicas: list[str], key: str) -> None:
    first = rank_replicas(key, dict.fromkeys(replicas))
    assert first == rank_replicas(key, dict.fromkeys(reversed(replicas)))
    assert sorted(first) == sorted(replicas)


@pytest.mark.parametrize("number", [2, 4, 16])
def test_homes_are_spread_evenly(number: int) -> None:
    counts = Counter(get_homes([f"replica {index}" for index in range(number)]).values())
    assert len(counts) == number
    assert max(counts.values()) < 1.5 * len(KEYS) / number


def test_a_new_replica_takes_its_share_and_moves_nothing_else() -> None:
    before = get_homes(["a", "b", "c"])
    after = get_homes(["a", "b", "c", "d"])
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {"d"}
    assert 0.2 < len(moved) / len(KEYS) < 0.3


def test_a_lost_replica_moves_its_own_keys_only() -> None:
    before = get_homes(["a", "b", "c", "d"])
    after = get_homes(["a", "b", "d"])
    assert all(before[key] == "c" for key in KEYS if before[key] != after[key])
    assert len({after[key] for key in KEYS if before[key] == "c"}) == 3, "shared by all others"


@given(st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 300), min_size=1), st.text())
def test_every_replica_is_ranked_once(queues: dict[str, int], key: str) -> None:
    assert sorted(Placement().rank(key, queues)) == sorted(queues)


@given(
    st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 300), min_size=2),
    st.text(),
)
def test_an_overloaded_replica_comes_after_all_that_are_not(
    queues: dict[str, int], key: str
) -> None:
    limits = LoadLimits(max_queue=100, min_queue=4, factor=1.5)
    ranked = Placement(limits).rank(key, queues)
    total = sum(queues.values())
    others = {r: (total - n) / (len(queues) - 1) for r, n in queues.items()}
    is_busy = [
        queues[r] >= 100 or (queues[r] >= 4 and queues[r] >= 1.5 * others[r]) for r in ranked
    ]
    assert is_busy == sorted(is_busy)
    busy = [queues[replica] for replica, each in zip(ranked, is_busy, strict=True) if each]
    assert busy == sorted(busy)


def test_a_key_stays_at_home_while_the_queue_is_short() -> None:
    placement = Placement(LoadLimits(min_queue=4, factor=1.5))
    home, *_ = rank_replicas("key", dict.fromkeys("abcd"))
    queues = dict.fromkeys("abcd", 0) | {home: 3}
    assert placement.rank("key", queues)[0] == home


@pytest.mark.parametrize("number", [2, 3, 8])
def test_requests_of_one_key_are_spread_when_there_are_many(number: int) -> None:
    """All requests that begin with the same long instructions have one key."""
    placement = Placement()
    queues = dict.fromkeys("abcdefgh"[:number], 0)
    for _ in range(100 * number):
        queues[placement.rank("key", queues)[0]] += 1
    most, total = max(queues.values()), sum(queues.values())
    assert most <= 2 * (total - most) / (number - 1) + 1


def test_a_single_replica_gets_all_requests() -> None:
    assert Placement(LoadLimits(max_queue=4)).rank("key", {"a": 9}) == ["a"]


def test_a_spilled_key_goes_where_it_went_before() -> None:
    placement = Placement(LoadLimits(min_queue=4, factor=1.5))
    home, second, third, last = rank_replicas("key", dict.fromkeys("abcd"))
    busy = dict.fromkeys("abcd", 0) | {home: 50}
    assert placement.rank("key", busy)[0] == second
    placement.note("key", third, home)  # the second one was gone at that moment
    assert placement.rank("key", busy)[:3] == [third, second, last]
    assert placement.rank("key", dict.fromkeys("abcd", 0))[0] == home, "home comes first again"
    assert placement.rank("key", {r: n for r, n in busy.items() if r != third})[0] == second
    assert (placement.num_placed, placement.num_spilled) == (1, 1)


def test_keys_at_home_take_no_memory() -> None:
    placement = Placement()
    for key in KEYS:
        placement.note(key, "home", "home")
    assert len(placement._places) == 0
    for number in range(10):
        placement.note("key", f"replica {number}", "home")
    assert len(placement._get_places("key", {f"replica {n}": 0 for n in range(10)})) == 4
