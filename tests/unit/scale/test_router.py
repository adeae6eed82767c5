"""What callers and metrics learn of the engines that the router chooses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sensorium.scale.placement import LoadLimits, Placement, get_tally, rank_replicas
from sensorium.scale.router import MediaAffinityRouter
from sensorium.utils.lru import LruCache


class _Router(MediaAffinityRouter):
    """A router without the parts of Ray that it inherits."""

    def __init__(self, queues: dict[str, int], *, deployment: str = "Engine") -> None:
        self._queues = queues
        self._tally = get_tally(deployment)
        self._placement = Placement(LoadLimits())
        self._homes = LruCache(100)

    def _get_queue(self, replica: Any) -> int:
        return self._queues[replica.replica_id.unique_id]


def _choose(router: _Router, **given: str | None) -> list[str]:
    """Return the names of the engines in the order in which a call is to try them."""
    replicas = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in router._queues
    ]
    request = SimpleNamespace(
        kwargs=given,
        metadata=SimpleNamespace(internal_request_id="call"),
        routing_context=SimpleNamespace(should_backoff=False),
    )
    ranks = asyncio.run(router.choose_replicas(cast(Any, replicas), cast(Any, request)))
    assert request.routing_context.should_backoff
    return [replica.replica_id.unique_id for rank in ranks for replica in rank]


def test_a_caller_can_tell_which_engine_was_tried_first() -> None:
    router = _Router({"a": 0, "b": 0, "c": 0})
    home, second, third = rank_replicas("key", router._queues)
    assert _choose(router, routing_key="key", ticket="t") == [home, second, third]
    assert get_tally("Engine").tried.get("t") == home
    again = _choose(router, routing_key="key", ticket="t", avoided=home)
    assert again == [second, third, home]
    assert get_tally("Engine").tried.get("t") == second


def test_a_call_for_one_engine_goes_there_unless_it_is_gone() -> None:
    router = _Router({"a": 300, "b": 0})
    assert _choose(router, routing_key="key", pinned="a") == ["a"]
    assert sorted(_choose(router, routing_key="key", pinned="gone")) == ["a", "b"]


@pytest.mark.parametrize("avoided", [None, "a", "gone"])
def test_only_the_first_try_of_a_call_is_counted(avoided: str | None) -> None:
    router = _Router({"a": 0, "b": 0})
    _choose(router, routing_key="key", avoided=avoided)
    assert (router._homes.get("call") is not None) == (avoided is None)


def test_the_routers_of_two_deployments_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend calls engines and encoders. Figures of encoders hide no engine."""
    monkeypatch.setattr(_Router, "curr_replicas", property(_list_replicas))
    for deployment, names in (("Engine", "ab"), ("Encoder", "c")):
        router = _Router(dict.fromkeys(names, 0), deployment=deployment)
        router._note_replicas()
    assert get_tally("Engine").replicas == ("a", "b")
    assert get_tally("Encoder").replicas == ("c",)


def _list_replicas(router: _Router) -> list[SimpleNamespace]:
    return [SimpleNamespace(unique_id=name) for name in router._queues]


def test_a_router_without_engines_chooses_none() -> None:
    assert _choose(_Router({}), routing_key="key", ticket="u") == []
