"""A child of the supervisor that speaks its protocol and computes nothing.

    python stand_in_child.py core|frontend FOLDER DESCRIPTOR

It writes each message that it receives to FOLDER/events, one JSON object per line. The files
FOLDER/core and FOLDER/frontend set its behaviour. A line is one of `fail`, `die`, `hang`, `busy`
and `deaf`, with the number of the first life (start of the process) that it applies to. Only the
work of the processes is replaced: the connection to the parent and all that follows from its end
are the server's own code.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from sensorium.engine.core_process import CoreInfo
from sensorium.server.metrics.metric_set import MetricSet
from sensorium.server.metrics.shared_files import CORE, write_as
from sensorium.server.processes.control import (
    TO_CORE,
    TO_FRONTEND,
    CoreReady,
    CoreUp,
    Drain,
    Serving,
    StartCore,
    StartFrontend,
    Stop,
    follow_parent,
    open_channel,
    receive_start,
    report_failure,
)
from sensorium.types.errors import ModelError
from sensorium.types.sampling import GenerationDefaults

FOLDER = Path(sys.argv[2])
STOPPED = threading.Event()


def note(who: str, event: str, **more: Any) -> None:
    line = json.dumps({"who": who, "pid": os.getpid(), "event": event, **more}) + "\n"
    with (FOLDER / "events").open("a") as file:  # one write, so that lines don't mix
        file.write(line)


def behave(kind: str, life: int, channel: Any) -> set[str]:
    path = FOLDER / kind
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    behaviours = {word for word, first in rows if life >= int(first)}
    if "die" in behaviours:
        os.kill(os.getpid(), signal.SIGKILL)
    if "fail" in behaviours:
        report_failure(channel, ModelError("this model is only a name"))
        os._exit(1)
    if "hang" in behaviours:
        work(behaviours)
    return behaviours


def work(behaviours: set[str]) -> NoReturn:
    while "busy" in behaviours:
        sum(range(1000))
    while True:
        if STOPPED.wait(60):
            os._exit(0)


def write_metrics(life: int) -> None:
    """Write that one request runs, in the first life; later lives do not touch the gauge."""
    write_as(CORE)
    gauge = MetricSet("a-model").gauge("vllm:num_requests_running")
    if life == 1:
        gauge.set(1)


def run_core() -> None:
    channel = open_channel(TO_CORE)
    start = receive_start(channel, StartCore)
    who = f"core-{start.life}"
    shm_bytes = None if start.shm_fd is None else os.fstat(start.shm_fd).st_size
    note(who, "StartCore", socket_dir=start.socket_dir, shm_bytes=shm_bytes)
    behaviours: set[str] = set()

    def handle(message: Any) -> None:
        note(who, type(message).__name__, identity=getattr(message, "identity", None))
        if isinstance(message, Stop) and "deaf" not in behaviours:
            STOPPED.set()

    follow_parent(channel, handle, socket_dir=start.socket_dir)
    behaviours |= behave("core", start.life, channel)
    write_metrics(start.life)
    Path(start.endpoint.removeprefix("ipc://")).touch()
    description = (("model", start.options.model), ("KV cache", "9 blocks"))
    info = CoreInfo(
        endpoint=start.endpoint,
        max_model_len=8,
        defaults=GenerationDefaults(),
        description=description,
    )
    channel.send(CoreReady(info))
    work(behaviours)


def run_frontend() -> None:
    channel = open_channel(TO_FRONTEND)
    start = receive_start(channel, StartFrontend)
    who, life = start.identity, int(start.identity.partition("-")[2])
    note(who, "StartFrontend", socket_dir=start.socket_dir)
    behaviours: set[str] = set()
    is_up = threading.Event()

    def handle(message: Any) -> None:
        endpoint = message.info.endpoint if isinstance(message, CoreUp) else None
        note(who, type(message).__name__, endpoint=endpoint)
        if isinstance(message, CoreUp):
            is_up.set()
        elif isinstance(message, Drain) and "deaf" not in behaviours:
            STOPPED.set()

    follow_parent(channel, handle, socket_dir=start.socket_dir)
    behaviours |= behave("frontend", life, channel)
    while not start.options.is_render_only and not is_up.wait(0.05):
        if STOPPED.is_set():
            os._exit(0)
    listener = socket.socket(fileno=start.listen_fd)
    listener.listen()
    note(who, "serves")
    description = (("engine", "none"),) if start.options.is_render_only else ()
    channel.send(Serving(description))
    work(behaviours)


if __name__ == "__main__":
    run_core() if sys.argv[1] == "core" else run_frontend()
