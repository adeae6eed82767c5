"""Prints what a user sees when a server starts: its resolved options and its address."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from sensorium import __version__
from sensorium.server.options import ServeOptions

logger = logging.getLogger(__name__)
Rows = Sequence[tuple[str, str]]


class Announcer:
    """A writer of lines for people on stdout, or of log entries if the log is JSON."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options

    def announce_start(self) -> None:
        """Announce that the server begins to load its model."""
        self._announce(f"Sensorium {__version__}: loading {self._options.model}", fields={})

    def announce_core(self, description: Rows) -> None:
        """Announce the engine, or the description of a server without an engine."""
        rows = [*description, *describe_media(self._options)]
        text = "the engine is ready" if self._has_json else format_rows(rows)
        self._announce(text, fields={"engine": dict(rows)})

    def announce_ready(self, url: str) -> None:
        """Announce that the server accepts requests, and where."""
        line = f"Sensorium is ready: {url}"
        if not self._has_json:
            kind = "it only renders" if self._options.is_render_only else "OpenAI's API below /v1"
            line += f"  ({kind}, documented at /docs)"
        self._announce(line, fields={"url": url})

    @property
    def _has_json(self) -> bool:
        return self._options.log_format == "json"

    def _announce(self, text: str, *, fields: Mapping[str, object]) -> None:
        if self._has_json:
            logger.info(text, extra={"fields": fields})
            return
        try:
            print(text, flush=True)
        except OSError:
            # The reader is gone, which is no reason not to serve. What is buffered must not raise
            # once more when the interpreter flushes it.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())


def describe_media(options: ServeOptions) -> Rows:
    """Return the rows about caches and processes for media."""
    num_processes = options.media.mm_processor_pool_size
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
    if not options.media.capacity_bytes:
        return "off"
    kind = "in shared memory" if options.shm_capacity_bytes else "lru, beside the engine"
    if options.is_render_only:
        kind = "in each frontend" if options.api_server_count > 1 else "in the frontend"
    return f"{options.media.mm_processor_cache_gb:g} GiB, {kind}"


def format_rows(rows: Rows) -> str:
    """Return rows of names and values as aligned lines."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
