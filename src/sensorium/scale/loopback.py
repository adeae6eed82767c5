"""Makes Ray Serve listen on this machine's loopback address only, if Ray itself does."""

from __future__ import annotations

from typing import Any

import ray
from ray.serve._private import replica as _replica

replica: Any = _replica
_ANY = "[::]"
_LOCAL = "127.0.0.1"


def listen_locally() -> None:
    """Make the server that Ray Serve starts in this process listen on 127.0.0.1 only.

    Each process of a deployment has a server that runs whatever other processes send it, and
    listens on all addresses. On a cluster of several machines that is necessary, and this function
    changes nothing. Call this in the constructor of a deployment, because the server is started
    after it.
    """
    if ray.util.get_node_ip_address() != _LOCAL:  # type: ignore[no-untyped-call]
        return
    add_port = replica.add_port_to_grpc_server

    def add_local_port(server: Any, address: str) -> int:
        return int(add_port(server, address.replace(_ANY, _LOCAL)))

    replica.add_port_to_grpc_server = add_local_port
