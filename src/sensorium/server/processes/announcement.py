"""What a server says of itself when it starts: what was resolved, and where it can be reached."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from sensorium import __version__
from sensorium.server.options import ServeOptions

logger = logging.getLogger(__name__)
Rows = Sequence[tuple[str, str]]


class Announcer:
    """Lines for people on stdout; entries of the log where that is made of JSON."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options

    def announce_start(self) -> None:
        line = f"Sensorium {__version__}: loading {self._options.model}"
        if self._options.log_format == "json":
            logger.info(line)
        else:
            _say(line)

    def announce_core(self, description: Rows) -> None:
        """Or, where there is none, what is said in its place."""
        rows = [*description, *describe_media(self._options)]
        if self._options.log_format == "json":
            logger.info("the engine is ready", extra={"fields": {"engine": dict(rows)}})
        else:
            _say(format_rows(rows))

    def announce_ready(self, url: str) -> None:
        line = f"Sensorium is ready: {url}"
        if self._options.log_format == "json":
            logger.info(line, extra={"fields": {"url": url}})
        else:
            kind = "it only renders" if self._options.is_render_only else "OpenAI's API below /v1"
            _say(f"{line}  ({kind}, documented at /docs)")


def _say(text: str) -> None:
    """Whoever read it may be gone, which is no reason not to serve."""
    try:
        print(text, flush=True)
    except OSError:
        # What is buffered must not raise once more when the interpreter flushes it.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def describe_model(options: ServeOptions) -> str:
    if options.model_names == (options.model,):
        return options.model
    return f"{options.model} as {', '.join(options.model_names)}"


def describe_media(options: ServeOptions) -> Rows:
    media = options.media
    num_processes = media.get("mm_processor_pool_size", 0)
    pool = "in the frontend's own process"
    if num_processes:
        pool = "1 process" if num_processes == 1 else f"{num_processes} processes"
    if options.api_server_count > 1:
        pool += " each"
    return (
        ("processor cache", _describe_cache(options)),
        ("frontends", str(options.api_server_count)),
        ("media processing", pool),
    )


def _describe_cache(options: ServeOptions) -> str:
    if not options.has_processor_cache:
        return "off"
    gibibytes = options.media.get("mm_processor_cache_gb", 4.0)
    kind = "in shared memory" if options.shm_capacity_bytes else "lru, beside the engine"
    if options.is_render_only:
        kind = "in each frontend" if options.api_server_count > 1 else "in the frontend"
    return f"{gibibytes:g} GiB, {kind}"


def format_rows(rows: Rows) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
