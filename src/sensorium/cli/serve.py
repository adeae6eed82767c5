"""`sensorium serve`: the HTTP server."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from sensorium.cli.engine_flags import add_engine_flags, make_engine_kwargs
from sensorium.cli.flags import MODEL_HELP, add_loading_flags, make_loading_kwargs
from sensorium.cli.media_flags import add_media_options, make_media_kwargs
from sensorium.cli.server_flags import add_server_flags, make_server_kwargs
from sensorium.embedded import EMBEDDED_MODEL
from sensorium.multimodal.limits import MediaLimits
from sensorium.server.options import ServeOptions
from sensorium.types.errors import ModelError

_MIN_POOL_SIZE = 2
_MAX_POOL_SIZE = 4
_MAX_SHM_MEMBERS = 256  # processes that may share the memory of a cache
_DESCRIPTION = """Serve a model over HTTP, by OpenAI's API. One process computes, others serve;
what dies is started again. SIGTERM lets requests in flight end, a second one does not."""
_EXAMPLES = """examples:
  sensorium serve                           (sensorium-mini, which comes with the package)
  sensorium serve MODEL
  sensorium serve MODEL --port 8080 --api-key SECRET --max-model-len 8192
  sensorium serve MODEL --api-server-count 4 --limit-mm-per-prompt image=4,video=1
"""


def add_command(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model(serve)
    add_server_flags(serve)
    add_loading_flags(serve)
    add_engine_flags(serve)
    add_media_options(serve, is_server=True)
    serve.set_defaults(run=run, refuse=serve.error)


def run(arguments: argparse.Namespace) -> None:
    run_server(make_options(arguments))


def run_server(options: ServeOptions) -> None:
    """Until it ends. Exits with its status, unless that is 0."""
    import asyncio

    from sensorium.server.logs import set_up_logging
    from sensorium.server.processes.supervisor import Supervisor

    set_up_logging("parent", log_format=options.log_format, log_level=options.log_level)
    status = asyncio.run(Supervisor(options).run())
    if status:
        sys.exit(status)


def make_options(arguments: argparse.Namespace) -> ServeOptions:
    """Ends the program with the usage if flags don't go together."""
    model = get_model(arguments)
    _choose_cache(arguments)
    return ServeOptions(
        model=model,
        **make_server_kwargs(arguments),
        loading={"model": model, **make_loading_kwargs(arguments)},
        engine=make_engine_kwargs(arguments),
        media=make_media(arguments),
    )


def add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--model", dest="named_model", metavar="MODEL", help="the same, by name")


def get_model(arguments: argparse.Namespace) -> str:
    if "" in (arguments.model, arguments.named_model):
        arguments.refuse("the name of the model is empty")
    model: str = arguments.model or arguments.named_model or EMBEDDED_MODEL
    if arguments.named_model not in (None, model):
        arguments.refuse(f"two models are named: {model} and {arguments.named_model}")
    return model


def _choose_cache(arguments: argparse.Namespace) -> None:
    count = arguments.api_server_count
    if arguments.mm_processor_cache_type is None:
        arguments.mm_processor_cache_type = "shm" if count > 1 else "lru"
    _choose_pool(arguments)
    has_cache, kind = arguments.mm_processor_cache_gb > 0, arguments.mm_processor_cache_type
    if has_cache and kind == "lru" and count > 1:
        arguments.refuse(
            f"--api-server-count {count} needs --mm-processor-cache-type shm (or leave it out): "
            "several processes share the cache of media. --mm-processor-cache-gb 0 has none"
        )
    num_members = count * (arguments.mm_processor_pool_size + 1) + 1
    if has_cache and kind == "shm" and num_members > _MAX_SHM_MEMBERS:
        arguments.refuse(
            f"{num_members} processes would share the cache of media, {_MAX_SHM_MEMBERS} can: "
            "use a smaller --mm-processor-pool-size or --api-server-count"
        )


def make_media(arguments: argparse.Namespace) -> dict[str, Any]:
    _choose_pool(arguments)
    path = arguments.allowed_local_media_path
    if path is not None and not Path(path).is_dir():
        arguments.refuse(f"--allowed-local-media-path {path!r} is not a directory")
    media = make_media_kwargs(arguments)
    try:
        MediaLimits(**media["media_limits"])
    except ModelError as error:
        arguments.refuse(str(error))
    return media


def _choose_pool(arguments: argparse.Namespace) -> None:
    if arguments.mm_processor_pool_size is None:
        size = choose_pool_size(arguments.api_server_count, _get_num_cores())
        arguments.mm_processor_pool_size = size


def choose_pool_size(num_frontends: int, num_cores: int) -> int:
    """Processes that each frontend has for media: a part of the cores, divided among them, and two
    at least, so that a picture does not wait for the end of a long video.
    """
    return max(_MIN_POOL_SIZE, min(_MAX_POOL_SIZE, num_cores // 2) // num_frontends)


def _get_num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
