"""Measures what a warm-up is worth, and the memory of a server without an engine.

Starts real servers on this machine, in turn with warm-up and with --no-warmup: the time until they
are healthy, and the latency of the first request of a kind and the median of the following ones,
each with an image that the server has not seen. Then the memory of `sensorium render` next to that
of `sensorium serve` with the same model.

    python benchmarks/warmup.py [--model DIR] [--rounds N] [--route PATH] [--record]
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import statistics
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

from live_server import LiveServer, is_healthy
from process_samples import sample_tree
from records import write_record
from soak_requests import make_image

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from make_tiny_models import make_family

FAMILY = "qwen2_5_omni"
RENDER_ROUTE = "/v1/chat/completions/render"
TOKENIZE_ROUTE = "/tokenize"
_FLAGS = ("--port", "0", "--max-model-len", "4096", "--no-access-log")
_WAYS = {"warm": "--warmup", "cold": "--no-warmup"}
_POLL_S = 0.01
_HEALTHY_S = 300.0
_SETTLE_S = 15.0  # for pools that start when a server is ready
_seeds = count()
Times = dict[str, float]


def make_bodies(route: str) -> dict[str, tuple[str, Any]]:
    """Return a path and a body for each kind of request; every picture is a new one."""
    url = f"data:image/png;base64,{base64.b64encode(make_image(next(_seeds))).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    text: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello, who are you?"}]}
    if not route.endswith("/render"):
        return {
            "image": (route, {**chat, "max_tokens": 1}),
            "text": (route, {**text, "max_tokens": 1}),
        }
    return {"image": (route, chat), "text": (TOKENIZE_ROUTE, text)}


def time_request(url: str, path: str, body: Any) -> float:
    """Return the milliseconds of a request over a connection of its own."""
    host = url.removeprefix("http://")
    content = json.dumps(body).encode()
    begun = time.monotonic()
    connection = http.client.HTTPConnection(host, timeout=120)
    try:
        connection.request("POST", path, content, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise SystemExit(f"{path}: {answer.status}: {text[:500]!r}")
    return (time.monotonic() - begun) * 1000


def time_server(model: str, way: str, *, command: str, route: str, num_requests: int) -> Times:
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        with LiveServer(model, *_FLAGS, _WAYS[way], log=log, command=command) as server:
            url = server.wait_for_url()
            while not is_healthy(url):
                if time.monotonic() - server.started > _HEALTHY_S:
                    raise SystemExit(f"the server is not healthy:\n{log.read_text()}")
                time.sleep(_POLL_S)
            times: Times = {"healthy_s": time.monotonic() - server.started}
            # The first of each kind, in this order: an image, then text.
            laps: dict[str, list[float]] = {}
            for _ in range(num_requests):
                for kind, (path, body) in make_bodies(route).items():
                    laps.setdefault(kind, []).append(time_request(url, path, body))
    for kind, own in laps.items():
        times[f"first_{kind}_ms"] = own[0]
        times[f"median_{kind}_ms"] = statistics.median(own[1:])
    return times


def weigh(model: str, command: str, *, route: str) -> dict[str, Any]:
    """Return memory in MiB by role and in all, once the pools have answered an image."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        with LiveServer(model, *_FLAGS, log=log, command=command) as server:
            url = server.wait_for_url()
            time.sleep(_SETTLE_S)
            path, body = make_bodies(route)["image"]
            if command == "serve" or path.endswith("/render"):
                time_request(url, path, body)
            samples = sample_tree(server.process.pid, seconds=0.0)
    roles: dict[str, float] = {}
    for sample in samples:
        roles[sample.role] = roles.get(sample.role, 0.0) + sample.pss_kib / 1024
    return {
        "pss_mib": {role: round(size, 1) for role, size in sorted(roles.items())},
        "total_pss_mib": round(sum(roles.values()), 1),
        "total_uss_mib": round(sum(sample.uss_kib for sample in samples) / 1024, 1),
    }


def summarise(rounds: list[Times]) -> Times:
    return {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[Times]] = {way: [] for way in _WAYS}
    for index in range(arguments.rounds):
        ways = list(_WAYS) if index % 2 == 0 else list(reversed(_WAYS))
        for way in ways:
            times = time_server(
                model,
                way,
                command=arguments.command,
                route=arguments.route,
                num_requests=arguments.requests,
            )
            rounds[way].append(times)
            print(f"{way}: {_format(times)}", flush=True)
    figures: dict[str, Any] = {
        "command": arguments.command,
        "route": arguments.route,
        "num_rounds": arguments.rounds,
        "num_requests": arguments.requests,
        **{way: summarise(rounds[way]) for way in _WAYS},
    }
    if not arguments.no_memory:
        figures["memory"] = {
            command: weigh(model, command, route=arguments.route) for command in ("serve", "render")
        }
    return figures


def _format(times: Times) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in times.items())


def print_summary(figures: dict[str, Any]) -> None:
    print(f"\n{'':<20}{'warm':>12}{'cold':>12}")
    for name in figures["warm"]:
        print(f"{name:<20}{figures['warm'][name]:>12.2f}{figures['cold'][name]:>12.2f}")
    for command, own in figures.get("memory", {}).items():
        print(f"memory of {command}: {own['total_pss_mib']} MiB (PSS of all processes)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help=f"a directory (default: a tiny {FAMILY})")
    parser.add_argument("--command", choices=["serve", "render"], default="serve")
    parser.add_argument("--route", default=RENDER_ROUTE, help=f"default {RENDER_ROUTE}")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of servers (default 5)")
    parser.add_argument("--requests", type=int, default=20, help="of each kind (default 20)")
    parser.add_argument("--no-memory", action="store_true", help="latency and time to healthy only")
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/records/warmup.json"
    )
    arguments = parser.parse_args()
    root = Path(__file__).parent.parent
    model = arguments.model or str(make_family(FAMILY, root / "build" / "tiny-models"))
    figures = {"model": Path(model).name, **measure(model, arguments)}
    print_summary(figures)
    if arguments.record:
        print(f"record: {write_record('warmup', figures).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
