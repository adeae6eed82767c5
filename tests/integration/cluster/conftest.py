"""A cluster with a real Ray on this machine, and a single-machine server to compare it with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.cluster.asking import MODEL
from tests.support.server import POOL, SHARED_SERVERS, ServerProcess

CLUSTER = ("--replicas", "2", "--frontends", "2", "--mm-processor-cache-gb", "0.5")
# Files above this size are encoded by the remote encoder.
APART_BYTES = 2**17
ENCODERS = ("--encoders", "1", "--encode-above", str(APART_BYTES))


@pytest.fixture(scope="package")
def cluster() -> Iterator[ServerProcess]:
    """Run two engines of the embedded model and an encoder behind two frontends.

    Tests may kill its processes, and wait until they are replaced.
    """
    yield from run_cluster(*ENCODERS)


def run_cluster(*flags: str) -> Iterator[ServerProcess]:
    """Run a cluster until the caller has done with it."""
    SHARED_SERVERS.make_room()
    server = ServerProcess(MODEL, *CLUSTER, *flags, command="deploy", is_cold=True)
    try:
        server.wait_until_ready()
        yield server
        assert server.stop(120.0) == 0
        assert "killed by `ray.kill`" not in server.output  # the end that was asked for is no error
    finally:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="package")
def single() -> Iterator[ServerProcess]:
    """Run the embedded model on one server."""
    with SHARED_SERVERS.use(MODEL, *POOL) as server:
        yield server
