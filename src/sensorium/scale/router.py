"""Routes calls to the engines of a cluster by the media that they bring, inside Ray Serve.

Ray makes a router in each process that calls engines. The routers share nothing: they place equal
keys alike (`scale.placement`). A caller gives the key, and may name an engine that must have the
call or one that should not, as keyword arguments.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

# A module, because Ray sends the class below to other processes with copies of what it refers to.
from sensorium.scale import placement
from sensorium.utils.lru import LruCache

_MAX_CALLS = 2**14


class MediaAffinityRouter(RequestRouter):
    """A router that sends equal media to the same engine, unless that is overloaded."""

    def initialize_state(self, **settings: Any) -> None:
        """Accept the name of the deployment (`deployment`), and the fields of `LoadLimits`."""
        self._tally = placement.get_tally(settings.pop("deployment"))
        self._placement = placement.Placement(placement.LoadLimits(**settings))
        # Ray's id of a call -> the home of its key. Calls that are never sent leave an entry.
        self._homes: LruCache[str, str] = LruCache(_MAX_CALLS)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        began = time.perf_counter()
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        given = {} if pending_request is None else pending_request.kwargs
        pinned, avoided = given.get("pinned"), given.get("avoided")
        if pending_request is not None:
            # Without this, Ray asks again at once for as long as all engines are full.
            pending_request.routing_context.should_backoff = True
        if pinned in by_name:
            return [[by_name[pinned]]]
        key = str(given.get("routing_key", ""))
        queues = {name: self._get_queue(replica) for name, replica in by_name.items()}
        order = self._placement.rank(key, queues)
        if avoided in by_name and len(order) > 1:
            order = [name for name in order if name != avoided] + [avoided]
        if (ticket := given.get("ticket")) is not None and order:
            self._tally.tried.put(ticket, order[0])
        if order and pending_request is not None and key and avoided is None:  # once for a call
            home = placement.rank_replicas(key, queues)[0]
            self._homes.put(pending_request.metadata.internal_request_id, home)
        self._tally.seconds += time.perf_counter() - began
        return [[by_name[name]] for name in order]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._note_replicas()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._note_replicas()

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: Any,  # noqa: ARG002
    ) -> None:
        """Count a call that has been sent, and note where its key was placed."""
        home = self._homes.get(pending_request.metadata.internal_request_id)
        key = pending_request.kwargs.get("routing_key")
        if home is None or not key:
            return
        self._tally.num_placed += 1
        self._tally.num_spilled += replica_id.unique_id != home
        self._placement.note(str(key), replica_id.unique_id, home)

    def _note_replicas(self) -> None:
        self._tally.replicas = tuple(replica.unique_id for replica in self.curr_replicas)

    def _get_queue(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
