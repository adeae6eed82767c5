"""A cluster on a Ray that runs already, with two nodes: more engines, fewer engines, config files.

Both nodes are on this machine. Each has a raylet and an object store of its own, so that files and
calls cross between nodes as they do between machines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cluster.asking import MODEL, make_chat, make_file, make_image, make_picture
from tests.integration.cluster.conftest import CLUSTER
from tests.support.server import ServerProcess, get_command, get_descendants

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.slow]
_WAIT_S = 300.0
_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
_ENGINES = 'vllm:engine_sleep_state{sleep_state="awake"}'
_ENGINE = "ServeReplica:sensorium:Engine"
_FLAGS = (*CLUSTER[4:], "--mm-processor-pool-size", "1")
_LONG = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
_NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
)
cluster.add_node(num_cpus=2)
raylets = [
    process.process.pid
    for node in cluster.list_all_nodes()
    for process in node.all_processes["raylet"]
]
print("nodes", cluster.address, *raylets, flush=True)
sys.stdin.readline()
cluster.shutdown()
"""
_SHUTDOWN = """
import sys
import ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
serve.shutdown()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """A Ray with two nodes."""

    address: str
    raylets: tuple[int, ...]  # the process of each node

    def list_engines(self) -> list[set[int]]:
        """Return the processes of the engines on each node."""
        return [
            {pid for pid in get_descendants(raylet) if _ENGINE in get_command(pid)}
            for raylet in self.raylets
        ]

    def count_engines(self) -> int:
        return sum(map(len, self.list_engines()))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Run a Ray with two nodes, without Ray Serve."""
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _NODES],
            env={**os.environ, **_LOCAL},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        word, address, *raylets = process.stdout.readline().split() or ("", "")
        assert word == "nodes", log.read_text()
        yield Nodes(address=address, raylets=tuple(map(int, raylets)))
        ending = [sys.executable, "-W", "ignore", "-c", _SHUTDOWN, address]
        subprocess.run(ending, env={**os.environ, **_LOCAL}, check=True, timeout=_WAIT_S)
    finally:
        process.communicate("\n", timeout=_WAIT_S)


def _deploy(nodes: Nodes, *flags: str) -> ServerProcess:
    """Deploy the embedded model. The application outlives the command."""
    flags = ("--ray-address", nodes.address, *_FLAGS, *flags)
    server = ServerProcess(MODEL, *flags, command="deploy", is_cold=True, **_LOCAL)
    server.wait_until_ready()
    assert server.stop(60.0) == 0
    return server


def _wait_until(is_reached: Callable[[], bool], found: Callable[[], object]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not is_reached():
        assert time.monotonic() < deadline, found()
        time.sleep(0.5)


def _wait_for_engines(nodes: Nodes, server: ServerProcess, count: int) -> None:
    """Wait until there are so many processes of engines, and all of them answer."""

    def is_reached() -> bool:
        try:
            ready = server.get_metrics().get(_ENGINES)
        except httpx.HTTPError:  # an engine that is just ending does not answer
            return False
        return ready == nodes.count_engines() == count

    _wait_until(is_reached, lambda: (nodes.list_engines(), server.output))


def _stream(server: ServerProcess, seed: int) -> bool:
    """Ask for a long answer, and return whether its stream came to its end."""
    body = make_chat([make_picture(seed)], stream=True, **_LONG)
    url = server.get_url("/v1/chat/completions")
    with httpx.stream("POST", url, json=body, timeout=_WAIT_S) as answer:
        text = "".join(answer.iter_text())
    return "data: [DONE]" in text and '"error"' not in text


def test_engines_on_two_nodes_answer_as_one_server(nodes: Nodes, single: ServerProcess) -> None:
    """Files above 64 KiB cross from the node of the frontend to that of the engine."""
    cluster = _deploy(nodes, "--replicas", "2")
    assert list(map(len, nodes.list_engines())) == [1, 1]
    cluster.reset_caches()
    before = cluster.get_metrics()
    files = [make_file(seed, "BMP", size=160) for seed in range(10)]
    assert all(len(file) > 2**16 for file in files)
    for file in files:
        body = make_chat([make_image(file, "BMP")], max_tokens=8, temperature=0)
        own, wanted = (server.post("/v1/chat/completions", body) for server in (cluster, single))
        own.raise_for_status()
        assert own.json()["choices"] == wanted.json()["choices"]
    encoded = 'sensorium:encoder_items_total{how="encoded"}'
    assert cluster.get_metrics()[encoded] - before[encoded] == len(files)


def test_the_number_of_engines_follows_the_load(nodes: Nodes) -> None:
    """Engines come while there are many requests and go when there are none. No request fails."""
    delays = ("--upscale-delay", "1", "--downscale-delay", "1")
    cluster = _deploy(
        nodes, "--replicas", "1", "--max-replicas", "2", "--target-requests", "1", *delays
    )
    _wait_for_engines(nodes, cluster, 1)
    with ThreadPoolExecutor(6) as threads:

        def ask_until_there_are_two() -> bool:
            assert all(threads.map(lambda seed: _stream(cluster, seed), range(6)))
            return nodes.count_engines() == 2

        _wait_until(ask_until_there_are_two, lambda: cluster.output)
        _wait_for_engines(nodes, cluster, 2)
    _wait_for_engines(nodes, cluster, 1)
    assert _stream(cluster, 1)


def _apply(nodes: Nodes, folder: Path, config: dict[str, Any], num_engines: int) -> None:
    """Give Ray Serve a config file, as an operator does, with another number of engines."""
    (application,) = config["applications"]
    application["deployments"] = [{"name": "Engine", "num_replicas": num_engines}]
    file = folder / "serve.json"
    file.write_text(json.dumps(config))
    script = [sys.executable, "-m", "ray.serve.scripts"]
    environment = {**os.environ, **_LOCAL}
    command = [*script, "run", "--non-blocking", "--address", nodes.address, str(file)]
    subprocess.run(command, env=environment, check=True, timeout=_WAIT_S)


def test_a_config_file_changes_the_number_of_engines_and_keeps_the_others(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Requests of an engine that is removed come to their end. Another one keeps its caches."""
    cluster = _deploy(nodes, "--replicas", "1")
    printing = [sys.executable, "-c", "from sensorium.cli import main; main()", "deploy", MODEL]
    printed = subprocess.run(
        [*printing, *_FLAGS, "--print-config"], check=True, capture_output=True, text=True
    )
    config = json.loads(printed.stdout)
    config["http_options"]["port"] = int(cluster.get_url().rpartition(":")[2])
    _apply(nodes, tmp_path, config, 1)
    (first,) = _wait_for_other_engines(nodes, cluster, 1, set().union(*nodes.list_engines()))
    _apply(nodes, tmp_path, config, 2)
    _wait_for_engines(nodes, cluster, 2)
    assert first in set().union(*nodes.list_engines())
    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(_stream, cluster, seed) for seed in range(8)]
        time.sleep(1.0)  # so that they have begun
        _apply(nodes, tmp_path, config, 1)
        assert all(stream.result() for stream in streams)
    _wait_for_engines(nodes, cluster, 1)


def _wait_for_other_engines(
    nodes: Nodes, server: ServerProcess, count: int, before: set[int]
) -> set[int]:
    """Wait until there are so many engines and none of those before, and return them."""
    _wait_until(
        lambda: not before & set().union(*nodes.list_engines()), lambda: nodes.list_engines()
    )
    _wait_for_engines(nodes, server, count)
    return set().union(*nodes.list_engines())
