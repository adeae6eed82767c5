"""Renders a second of one 720p picture: fresh or repeated, as JSON, msgpack or metadata alone.

A picture is a JPEG of 1280 x 720 with noise on it, sent as base64 in a chat. `fresh`: every request
has another one; `repeated`: all have the same. `metadata`: "return_kwargs": false, tokens, hashes
and placeholders without pixels. Kinds and servers run in turn, after a warm-up of each that is not
counted; figures are medians over the rounds. `per_core`: renders for each second of processor time
that the server's processes took, where these are known (those that are started here, or below
--pid); clients have a process of their own.

Without --base-url it starts `sensorium render` on a tiny Qwen2.5-VL with a processor that has the
real sizes. Any other server is measured next to it with --base-url (its render route, JSON
only unless it answers msgpack), one after the other in each round:

python benchmarks/render.py [--base-url NAME=URL[,PID]] [--rounds N] [--requests N] [--record]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from PIL import Image

from live_server import LiveServer
from process_samples import get_cpu_seconds, list_tree
from records import write_record

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from make_tiny_models import make_family

ROUTE = "/v1/chat/completions/render"
WIDTH, HEIGHT = 1280, 720
_MSGPACK = "application/x-msgpack"
_TIMEOUT_S = 120.0
KINDS = ("json", "msgpack", "metadata")
_seeds = count()


@dataclass(slots=True, kw_only=True)
class Target:
    """A server to measure, and what it can answer."""

    name: str
    url: str
    pid: int | None = None  # the parent of all processes of the server
    kinds: tuple[str, ...] = KINDS  # what it can answer
    figures: dict[str, list[dict[str, float]]] = field(default_factory=dict)


def make_model(directory: Path) -> Path:
    """The tiny Qwen2.5-VL, with room for large pictures, and no weights."""
    source = make_family("qwen2_5_vl", Path(__file__).parent.parent / "build" / "tiny-models")
    model = directory / "model"
    shutil.copytree(source, model, ignore=shutil.ignore_patterns("*.safetensors"))
    processor = json.loads((model / "processor_config.json").read_text())
    for part in ("image_processor", "video_processor"):
        processor[part]["size"] = {"shortest_edge": 3136, "longest_edge": 12845056}
    (model / "processor_config.json").write_text(json.dumps(processor))
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 32768
    (model / "config.json").write_text(json.dumps(config))
    return model


def make_picture() -> str:
    """Make another picture with every call, as the base64 of a data URL."""
    generator = np.random.default_rng(next(_seeds))
    waves = generator.normal(size=(HEIGHT // 16, WIDTH // 16, 3)) * 60 + 128
    pixels = np.kron(waves, np.ones((16, 16, 1))) + generator.normal(size=(HEIGHT, WIDTH, 3)) * 8
    stream = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    return base64.b64encode(stream.getvalue()).decode()


def make_body(picture: str, kind: str) -> bytes:
    url = f"data:image/jpeg;base64,{picture}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 16}
    if kind == "metadata":
        body["return_kwargs"] = False
    return json.dumps(body).encode()


async def post_all(target: Target, bodies: list[bytes], kind: str, num_clients: int) -> int:
    """Return how many bytes came back, and raise for whatever is no render."""
    headers = {"content-type": "application/json"}
    if kind == "msgpack":
        headers["accept"] = _MSGPACK
    waiting = iter(bodies)
    num_bytes = 0

    async def run(client: httpx.AsyncClient, rest: Iterator[bytes]) -> None:
        nonlocal num_bytes
        for body in rest:
            answer = await client.post(target.url + ROUTE, content=body, headers=headers)
            if answer.status_code != 200:
                raise SystemExit(f"{target.name}: {answer.status_code} {answer.text[:500]}")
            num_bytes += len(answer.content)

    async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
        await asyncio.gather(*(run(client, waiting) for _ in range(num_clients)))
    return num_bytes


def check_answer(target: Target, kind: str) -> int:
    """Return the number of tokens, and check that there are pixels where there should be some."""
    headers = {"content-type": "application/json"}
    if kind == "msgpack":
        headers["accept"] = _MSGPACK
    body = make_body(make_picture(), kind)
    answer = httpx.post(target.url + ROUTE, content=body, headers=headers, timeout=_TIMEOUT_S)
    answer.raise_for_status()
    is_msgpack = answer.headers["content-type"].startswith(_MSGPACK)
    decoded: Any = msgspec.msgpack.decode(answer.content) if is_msgpack else answer.json()
    if is_msgpack != (kind == "msgpack"):
        raise SystemExit(f"{target.name} does not answer as {kind}")
    has_pixels = (decoded["features"].get("kwargs_data") or {}).get("image") is not None
    if len(decoded["token_ids"]) < 1000 or has_pixels == (kind == "metadata"):
        raise SystemExit(f"{target.name}: {kind} has other content than it should")
    return len(decoded["token_ids"])


def measure_once(
    target: Target, kind: str, *, is_fresh: bool, num_requests: int, num_clients: int
) -> dict[str, float]:
    first = make_body(make_picture(), kind)
    bodies = [first] * num_requests
    if is_fresh:
        bodies = [make_body(make_picture(), kind) for _ in range(num_requests)]
    else:
        asyncio.run(post_all(target, [first], kind, 1))
    cpu_s, begun = _get_cpu(target), time.perf_counter()
    num_bytes = asyncio.run(post_all(target, bodies, kind, num_clients))
    seconds = time.perf_counter() - begun
    figures = {
        "renders_per_s": num_requests / seconds,
        "answer_mb": num_bytes / num_requests / 1e6,
    }
    if cpu_s is not None:
        figures["per_core"] = num_requests / max(1e-3, (_get_cpu(target) or 0.0) - cpu_s)
    return figures


def _get_cpu(target: Target) -> float | None:
    if target.pid is None:
        return None
    return sum(get_cpu_seconds(pid) for pid in list_tree(target.pid))


def measure(targets: list[Target], arguments: argparse.Namespace) -> dict[str, Any]:
    num_tokens = {
        f"{target.name} {kind}": check_answer(target, kind)
        for target in targets
        for kind in target.kinds
    }
    if len(set(num_tokens.values())) > 1:
        raise SystemExit(f"the work differs, so it can't be compared: tokens {num_tokens}")
    for index in range(arguments.rounds + 1):
        for freshness in ("fresh", "repeated"):
            for kind in KINDS:
                for target in (t for t in targets if kind in t.kinds):
                    figures = measure_once(
                        target,
                        kind,
                        is_fresh=freshness == "fresh",
                        num_requests=arguments.requests,
                        num_clients=arguments.clients,
                    )
                    if index:
                        target.figures.setdefault(f"{freshness} {kind}", []).append(figures)
                        print(f"{target.name:10} {freshness:8} {kind:8} {_format(figures)}")
    return {
        "picture": f"{WIDTH}x{HEIGHT} JPEG",
        "num_prompt_tokens": num_tokens,
        "num_rounds": arguments.rounds,
        "num_requests": arguments.requests,
        "num_clients": arguments.clients,
        **{target.name: _summarise(target) for target in targets},
    }


def _summarise(target: Target) -> dict[str, dict[str, float]]:
    return {
        name: {
            key: round(statistics.median(entry[key] for entry in rounds), 2) for key in rounds[0]
        }
        for name, rounds in target.figures.items()
    }


def _format(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in figures.items())


def parse_target(text: str) -> Target:
    name, _, rest = text.rpartition("=")
    url, _, pid = rest.partition(",")
    return Target(
        name=name or url,
        url=url.rstrip("/"),
        pid=int(pid) if pid else None,
        kinds=("json",),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--base-url",
        action="append",
        type=parse_target,
        default=[],
        metavar="NAME=URL[,PID]",
        help="a server to measure beside ours; may be repeated",
    )
    parser.add_argument("--without-ours", action="store_true", help="only those of --base-url")
    parser.add_argument("--rounds", type=int, default=5, help="that are counted (default 5)")
    parser.add_argument("--requests", type=int, default=16, help="of each kind, in each round")
    parser.add_argument("--clients", type=int, default=4, help="at a time (default 4)")
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/records/render.json"
    )
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets: list[Target] = list(arguments.base_url)
        if not arguments.without_ours:
            flags = ("--port", "0", "--no-access-log", "--max-model-len", "16384")
            server = LiveServer(
                str(make_model(directory)), *flags, command="render", log=directory / "server.log"
            )
            stack.enter_context(server)
            url = server.wait_for_url()
            targets.insert(0, Target(name="sensorium", url=url, pid=server.process.pid))
        figures = measure(targets, arguments)
    if arguments.record:
        print(f"record: {write_record('render', figures).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
