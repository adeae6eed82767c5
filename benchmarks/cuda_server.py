"""A server under load: times to the first token and throughput, next to those of another server.

Measures our server, which it starts (`--serve DIR`, flags for it behind `--`) or finds running
(`--url`). With `--beside URL` it sends the same requests to a peer that serves the same model, for
example vLLM: each load to one server and then to the other, which goes first in turn. It asks both
how many prompt tokens each kind of request has, and stops if they differ; so it does if
a request in the rounds is counted differently, an answer has another length than was asked for, or
two transcripts of a clip differ.

Loads of models that chat (`chats`, the default):

{chats}

Loads of models that transcribe (`speech`):

{speech}

A load is sent once in a short form before the first round. Requests are made before the clock runs
and sent by several processes; pictures, clips and texts are new in each round. Ratios are of ours
to the peer's within a round, and of several rounds the median. `--make` first makes a random
Qwen2.5-VL for `--serve`, as `qwen_shapes.py` does.

`python benchmarks/cuda_server.py (--serve DIR | --url URL) [--beside URL] [--loads NAME ...]
    [--peer-name NAME] [--peer-command TEXT] [--record-to PATH]`

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import urllib.error
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from load_clients import AnswerError, Clients
from server_loads import CHAT_LOADS, LOADS, PROBES, SPEECH, shrink
from server_rounds import Plan, UnlikeWorkError, check_kinds, get_version, measure

# Processes load this module again when they start, so what is slow to import is imported later.

MODEL = "m"
NUM_WORDS = 64
NUM_CLIENTS = 16
GROUPS = {"chats": CHAT_LOADS, "speech": SPEECH}
MADE_SHAPES = ("3b", "7b", "tiny")  # by qwen_shapes.py


def make_plan(arguments: argparse.Namespace, url: str) -> Plan:
    names = [name for given in arguments.loads for name in GROUPS.get(given, (given,))]
    loads = {name: load for name, load in LOADS.items() if name in names}
    probes = PROBES if "probe" in names else {}
    if arguments.quick:
        loads = {name: shrink(load) for name, load in loads.items()}
        probes = {name: shrink(load) for name, load in probes.items()}
    return Plan(
        sides={
            "ours": url,
            **({"peer": arguments.beside} if arguments.beside else {}),
        },
        loads=loads,
        probes=probes,
        seed=arguments.seed,
        model=arguments.model,
        num_rounds=arguments.rounds,
        num_words=arguments.words or None,
    )


def run(arguments: argparse.Namespace, url: str, started: dict[str, Any]) -> dict[str, Any]:
    """Return the figures, with what was measured of whom."""
    plan = make_plan(arguments, url)
    servers: dict[str, Any] = {}
    for side, address in plan.sides.items():
        name = arguments.peer_name if side == "peer" else "Sensorium"
        command = arguments.peer_command if side == "peer" else arguments.our_command
        try:
            version = get_version(address)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{address}/version: {error}; the record must say it") from error
        servers[side] = {"name": name, "version": version, "command": command}
        start_s = arguments.peer_start_s if side == "peer" else arguments.our_start_s
        if start_s:
            servers[side]["start_s"] = start_s
        print(f"{side}: {name} {json.dumps(version)}", flush=True)
    servers["ours"] |= started
    num_prompt_tokens = check_kinds(plan)
    with Clients(arguments.clients) as clients:
        loads = measure(plan, clients)
    return {
        "servers": servers,
        "shape": arguments.shape,
        "num_rounds": plan.num_rounds,
        "num_clients": arguments.clients,
        "seed": plan.seed,
        "is_quick": arguments.quick,
        "num_prompt_tokens": num_prompt_tokens,
        "loads": loads,
    }


def print_table(loads: dict[str, Any]) -> None:
    for figures in loads.values():
        name = figures["headline"]
        values = {
            side: ", ".join(str(each[name]) for each in figures[side])
            for side in ("ours", "peer")
            if side in figures
        }
        ratio = f", ratio {figures['ratio'][name]}" if "ratio" in figures else ""
        print(f"{figures['what']}: {name} {' beside '.join(values.values())}{ratio}", flush=True)


def serve(arguments: argparse.Namespace, stack: ExitStack) -> tuple[str, dict[str, Any]]:
    """Start our server, and return its address and how long that took."""
    from live_server import LiveServer

    if arguments.make:
        from qwen_shapes import make_directory

        make_directory(Path(arguments.serve), arguments.shape)
    log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
    flags = ["--served-model-name", arguments.model, "--port", "0", *arguments.flags]
    server = stack.enter_context(LiveServer(arguments.serve, *flags, log=log))
    url = server.wait_for_url()
    start_s = round(time.monotonic() - server.started, 1)
    print(f"ready after {start_s} s\n{log.read_text()}", flush=True)
    return url, {"start_s": [start_s], "command": " ".join(["sensorium", "serve", "DIR", *flags])}


def describe() -> str:
    """Return the description, with the names of the loads and what they are."""

    def list_loads(names: tuple[str, ...]) -> str:
        what = {name: load.what for name, load in LOADS.items()}
        what["probe"] = "; ".join(load.what for load in PROBES.values())
        return "\n".join(f"  {name:18s} {what[name]}" for name in names)

    return (__doc__ or "").format(chats=list_loads(CHAT_LOADS), speech=list_loads(SPEECH))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=describe(), formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--serve", metavar="DIR", help="start our server on this model")
    where.add_argument("--url", help="our server, which runs already")
    add("--beside", metavar="URL", help="a peer's server with the same model")
    add("--peer-name", default="peer", metavar="NAME", help="of the peer, for the record")
    add("--peer-command", metavar="TEXT", help="how the peer was started, for the record")
    add("--our-command", metavar="TEXT", help="how ours was started, for the record with --url")
    seconds: dict[str, Any] = {"type": float, "nargs": "+", "metavar": "S"}
    add("--our-start-s", **seconds, help="how long ours took to be healthy, for the record")
    add("--peer-start-s", **seconds, help="how long the peer took, for the record")
    add("--make", action="store_true", help="make the model of --serve first")
    shapes = (*MADE_SHAPES, "whisper-large-v3")
    add("--shape", choices=shapes, help="of the model, for the record; what --make makes")
    add("--model", default=MODEL, metavar="NAME", help=f"its served name (default {MODEL})")
    names = [*GROUPS, "probe", *LOADS]
    add("--loads", nargs="+", default=["chats"], choices=names, metavar="NAME", help="which")
    add("--rounds", type=int, default=2, metavar="N", help="rounds of all loads (default 2)")
    add("--words", type=int, default=NUM_WORDS, metavar="N", help="of a transcript; 0: any number")
    num_clients = min(NUM_CLIENTS, os.cpu_count() or 1)
    add("--clients", type=int, default=num_clients, metavar="N", help="processes that ask")
    add("--seed", type=int, default=int(time.time()), metavar="N", help="default: the clock's")
    add("--quick", action="store_true", help="tiny loads, to try the script")
    add("--record-to", type=Path, metavar="PATH", help="write a record there")
    add("--commit", help="the commit that is measured, where there is no git")
    add("flags", nargs="*", help="of our server, behind --")
    arguments = parser.parse_args()
    if "transcripts_again" in arguments.loads and "transcripts" not in arguments.loads:
        parser.error("transcripts_again repeats transcripts: name both")
    if arguments.make and not (arguments.serve and arguments.shape in MADE_SHAPES):
        made = ", ".join(MADE_SHAPES)
        parser.error(f"--make needs --serve, where it makes the model, and a --shape of {made}")
    return arguments


def main() -> None:
    arguments = parse()
    with ExitStack() as stack:
        url, started = serve(arguments, stack) if arguments.serve else (arguments.url, {})
        try:
            figures = run(arguments, url, started)
        except (AnswerError, UnlikeWorkError) as error:
            raise SystemExit(f"nothing is recorded: {error}") from error
    if arguments.record_to is not None:
        from records import write_record

        write_record("cuda_server", figures, path=arguments.record_to, commit=arguments.commit)
    print_table(figures["loads"])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
