"""The commands that start a server: `serve` with an engine, `render` without one, and `demo`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from sensorium.cli.flags import (
    ENGINE_GROUPS,
    MODEL_HELP,
    add_server_command,
    get_given,
    look_at_model,
    tell_notes,
)
from sensorium.cli.keys import take_keys
from sensorium.embedded import EMBEDDED_MODEL
from sensorium.engine.assembly.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.multimodal.media import MediaLimits
from sensorium.server.options import ServeOptions
from sensorium.types.errors import SensoriumError
from sensorium.utils.system_memory import get_free_system_bytes

_MIN_POOL_SIZE = 2
_MAX_POOL_SIZE = 4
_MAX_THREADS = 4  # of one process for media; more hardly help
_MAX_FRONTENDS = 4  # that are started without being asked for
_CORES_PER_FRONTEND = 4
_MAX_SHARE = 0.25  # of the free memory, for a media cache that is shared by default
_SERVE = """Serve a model over HTTP, with OpenAI's API. One process computes and others serve; a
process that dies is started again. After SIGTERM requests in flight may end; a second SIGTERM ends
them too."""
_SERVE_EXAMPLES = """examples:
  sensorium serve                           (sensorium-mini, which comes with the package)
  sensorium serve MODEL
  sensorium serve MODEL --port 8080 --api-key-file PATH --max-model-len 8192
  sensorium serve MODEL --api-server-count 4 --limit-mm-per-prompt image=4,video=1
"""
_RENDER = """Render for a model that runs elsewhere: conversations and prompts in, tokens and
processed media out, over HTTP. It needs only the small files of a checkpoint. Signals are those of
`serve`. Each frontend has a cache of its own for processed media."""
_RENDER_EXAMPLES = """examples:
  sensorium render MODEL --port 8001
  sensorium render MODEL --api-server-count 4 --mm-processor-cache-gb 1
"""
_DEMO = """Start a server on this machine, ask it about the pictures, audio and the video
that come with the package, and then ask other questions about the same media: what was processed
once is not processed again. Times are those of a client, from a question to the end of its answer.
Also ends the server."""
_DEMO_EPILOG = "On a terminal with colors and at least 68 columns, media is drawn. Ctrl-C ends it."


def add_serve(commands: Any) -> None:
    _add(commands, "serve", "serve a model over HTTP", _SERVE, _SERVE_EXAMPLES)
    summary = "render for a model that runs elsewhere, over HTTP"
    _add(commands, "render", summary, _RENDER, _RENDER_EXAMPLES)


def _add(commands: Any, name: str, summary: str, description: str, examples: str) -> None:
    add_server_command(
        commands,
        name,
        ServeOptions,
        *ENGINE_GROUPS,
        summary=summary,
        description=description,
        examples=examples,
        run=_serve,
    )


def add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="show what a model sees and takes, and what its caches save",
        description=_DEMO,
        epilog=_DEMO_EPILOG,
    )
    demo.add_argument("model", nargs="?", metavar="MODEL", default=EMBEDDED_MODEL, help=MODEL_HELP)
    demo.add_argument(
        "--no-color", action="store_true", help="Write plain text, and draw no media."
    )
    demo.set_defaults(run=_run_demo)


def _run_demo(arguments: argparse.Namespace) -> None:
    look_at_model(arguments.model, arguments)
    from sensorium.cli.demo import run_demo  # imports libraries for pictures and terminals

    run_demo(arguments)


def _serve(arguments: argparse.Namespace) -> None:
    options = make_options(arguments)
    from sensorium.server.logs import set_up_logging

    set_up_logging("parent", log_format=options.log_format, log_level=options.log_level)
    tell_notes(arguments, options.log_format)
    look_at_model(options.model, arguments, needs_weights=not options.is_render_only)
    import asyncio

    from sensorium.server.processes.supervisor import Supervisor

    status = asyncio.run(Supervisor(options).run())
    if status:
        sys.exit(status)


def make_options(arguments: argparse.Namespace) -> ServeOptions:
    """Return the options of a server that the command line gives, with defaults for the others.

    If a value is not valid, the usage and the error are printed and the process exits with code 2.
    """
    loading = get_given(arguments, LoadingOptions) | {"model": get_model(arguments)}
    try:
        limits = MediaLimits(**get_given(arguments, MediaLimits))
        server, media = _choose_processes(arguments)
        server |= get_given(arguments, ServeOptions)
        notes: list[str] = []
        server["api_key"] = take_keys(server.get("api_key", ()), server.get("api_key_file"), notes)
        arguments.notes = [*getattr(arguments, "notes", ()), *notes]
        media |= get_given(arguments, MediaOptions)
        return ServeOptions(
            loading=LoadingOptions(**loading),
            engine=EngineOptions(**get_given(arguments, EngineOptions)),
            media=MediaOptions(**media, media_limits=limits),
            is_render_only=arguments.command == "render",
            **server,
        )
    except SensoriumError as error:
        arguments.refuse(str(error))
        raise


def get_model(arguments: argparse.Namespace) -> str:
    if "" in (arguments.model, arguments.named_model):
        arguments.refuse("the name of the model is empty")
    model: str = arguments.model or arguments.named_model or EMBEDDED_MODEL
    if arguments.named_model not in (None, model):
        arguments.refuse(f"two models are named: {model} and {arguments.named_model}; give one")
    return model


def _choose_processes(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the defaults of server options and of media options that depend on the machine."""
    num_cores = count_cores()
    given = get_given(arguments, MediaOptions)
    num_frontends, reason = getattr(arguments, "api_server_count", None), ""
    if num_frontends is None and arguments.command != "serve":
        num_frontends = 1
    elif num_frontends is None:
        num_frontends, reason = choose_frontends(
            num_cores,
            has_gpu=_may_have_gpu(arguments),
            has_lru=given.get("mm_processor_cache_type") == "lru",
            cache_bytes=MediaOptions(**given).capacity_bytes,
            free_bytes=get_free_system_bytes(),
        )
    pool_size = given.get("mm_processor_pool_size", choose_pool_size(num_frontends, num_cores))
    num_left = num_cores - 1 - num_frontends  # one for the core
    num_threads = num_left // max(1, num_frontends * pool_size)
    server = {"api_server_count": num_frontends, "frontends_reason": reason}
    media = {
        "mm_processor_cache_type": "shm" if num_frontends > 1 else "lru",
        "mm_processor_pool_size": pool_size,
        "mm_processor_threads": (
            max(1, min(_MAX_THREADS, num_threads)) if _may_have_gpu(arguments) else 1
        ),
    }
    return server, media


def count_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _may_have_gpu(arguments: argparse.Namespace) -> bool:
    """Return whether the engine will probably compute on a GPU; torch is not loaded here."""
    is_asked = str(getattr(arguments, "device", "auto")).startswith(("auto", "cuda"))
    return arguments.command != "render" and is_asked and Path("/dev/nvidiactl").exists()


def choose_frontends(
    num_cores: int, *, has_gpu: bool, has_lru: bool, cache_bytes: int, free_bytes: int
) -> tuple[int, str]:
    """Return how many frontends a server starts if the user does not say, and why.

    `has_lru` means that the user asked for a media cache that only one frontend can have. Several
    frontends share `cache_bytes` of memory. The machine has `free_bytes` left.
    """
    if not has_gpu:
        return 1, "the engine computes on the CPU" if num_cores >= 2 * _CORES_PER_FRONTEND else ""
    num_frontends = min(_MAX_FRONTENDS, num_cores // _CORES_PER_FRONTEND)
    if num_frontends < 2:
        return 1, f"there are {num_cores} CPU cores"
    if has_lru:
        return 1, "a media cache of the kind lru can't be shared"
    if cache_bytes > free_bytes * _MAX_SHARE:
        return 1, "there is too little memory for a media cache that is shared"
    return num_frontends, f"for {num_cores} CPU cores"


def choose_pool_size(num_frontends: int, num_cores: int) -> int:
    """Return how many processes each frontend starts for media: a share of half of the cores."""
    # At least two, so that an image does not wait until a long video is finished.
    return max(_MIN_POOL_SIZE, min(_MAX_POOL_SIZE, num_cores // 2) // num_frontends)
