"""Measures the time from `sensorium serve` to the first 200 of /health.

A bare import of torch and transformers stands next to it. Each run is fresh processes; both kinds
run in turn, after one round that is not counted; the figures are medians. The server is the
installed console script on a tiny model with its defaults. `stages`, in seconds after the start:
the core and the frontend are started by the parent; then each of them has imported and built what
it needs. `first image`: the answer to a request that is sent as soon as the server is healthy.

python benchmarks/time_to_healthy.py [--rounds N] [--record]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import base64
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from live_server import LiveServer, get_command, is_healthy
from process_samples import get_cpu_seconds, list_tree
from records import write_record
from soak_requests import make_image

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from make_tiny_models import make_family

MODEL = "qwen2_5_vl"
_BARE = "import torch, transformers"
_HEALTHY_S = 300.0
_POLL_S = 0.01
Times = dict[str, float]


def time_import() -> Times:
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", _BARE], check=True)
    return {"import": time.monotonic() - begun}


def time_server(model: str, log: Path) -> Times:
    port = _find_port()
    flags = ("--port", str(port), "--max-model-len", "1024", "--no-access-log")
    with LiveServer(model, *flags, log=log) as server:
        url = f"http://127.0.0.1:{port}"
        times: Times = {}
        while not is_healthy(url):
            if server.process.poll() is not None or _get_seconds(server) > _HEALTHY_S:
                raise SystemExit(f"the server is not healthy:\n{log.read_text()}")
            if "children started" not in times and len(list_tree(server.process.pid)) >= 3:
                times["children started"] = _get_seconds(server)
            if "core ready" not in times and "KV cache" in log.read_text():
                times["core ready"] = _get_seconds(server)
            time.sleep(_POLL_S)
        times["healthy"] = _get_seconds(server)
        times["cpu"] = sum(get_cpu_seconds(pid) for pid in list_tree(server.process.pid))
        _ask_for_image(url)
        times["first image"] = _get_seconds(server)
    return times


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _get_seconds(server: LiveServer) -> float:
    return time.monotonic() - server.started


def _ask_for_image(url: str) -> None:
    image = f"data:image/png;base64,{base64.b64encode(make_image(0)).decode()}"
    part = {"type": "image_url", "image_url": {"url": image}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def measure(model: str, num_rounds: int) -> dict[str, Any]:
    bare: list[Times] = []
    ours: list[Times] = []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(num_rounds + 1):
            bare.append(time_import())
            ours.append(time_server(model, Path(directory) / "server.log"))
            print(f"import {bare[-1]['import']:.2f} s, {_format(ours[-1])}", flush=True)
    del bare[0], ours[0]
    import_s = _get_median(bare, "import")
    stages = {name: round(_get_median(ours, name), 3) for name in ours[0]}
    return {
        "command": Path(get_command()[0]).name,
        "num_rounds": num_rounds,
        "import_s": round(import_s, 3),
        "stages": stages,
        "ratio": round(stages["healthy"] / import_s, 3),
        "ratios_of_pairs": [
            round(own["healthy"] / base["import"], 3) for own, base in zip(ours, bare, strict=True)
        ],
    }


def _get_median(rounds: list[Times], name: str) -> float:
    return statistics.median(times.get(name, 0.0) for times in rounds)


def _format(times: Times) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="how often (default 7)")
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/records/time_to_healthy.json"
    )
    arguments = parser.parse_args()
    model = make_family(MODEL, Path(__file__).parent.parent / "build" / "tiny-models")
    figures = measure(str(model), arguments.rounds)
    if arguments.record:
        print(f"record: {write_record('time_to_healthy', figures).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
