"""Writes log lines to stderr, and announces the start of a server.

Log lines are text or JSON, and have the name of the process. The announcement is printed on stdout,
or logged with its values in separate fields if the log is JSON.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from sensorium import __version__
from sensorium.server.options import LogFormat, LogLevel, ServeOptions

logger = logging.getLogger(__name__)
Rows = Sequence[tuple[str, str]]  # names and values
# The level of libraries. At a lower one uvicorn would announce each of its starts, which the
# supervisor does already. uvicorn's access log is used as it is.
_QUIET = logging.WARNING
# The parent prints the resolved options of the engine for people, so its log lines are left out.
_PRINTED_ELSEWHERE = "sensorium.engine.assembly.builder"
ACCESS_LOGGER = "uvicorn.access"


class _Handler(logging.StreamHandler[TextIO]):
    """A log handler for stderr that loses a line without an error if it can't be written."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class TextFormatter(logging.Formatter):
    """A formatter of log records as lines of text that contain the name of the process."""

    default_msec_format = "%s.%03d"

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process:<11} %(name)s: %(message)s")


class JsonFormatter(logging.Formatter):
    """A formatter of log records as lines of JSON that contain the name of the process.

    A log call adds members to the JSON object with `extra={"fields": {...}}`. Members with the name
    of a standard one, such as "time" or "message", are ignored.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3]
            + "Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "process_id": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = record.__dict__.get("fields")
        if isinstance(fields, dict):
            line |= {str(name): value for name, value in fields.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def set_up_logging(
    process: str, *, log_format: LogFormat, log_level: LogLevel, access_log: bool = False
) -> None:
    """Set the format, the level and the destination (stderr) of all logs of this process.

    Log lines have the name `process`, such as "parent" or "frontend-0". With `access_log` uvicorn
    logs a line for each HTTP request. Libraries log only warnings and errors.
    """
    handler = _Handler()
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    level = logging.getLevelNamesMapping()[log_level.upper()]
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(level, _QUIET))
    logging.getLogger("sensorium").setLevel(level)
    logging.getLogger(_PRINTED_ELSEWHERE).setLevel(level if log_level == "debug" else _QUIET)
    logging.getLogger(ACCESS_LOGGER).setLevel(level if access_log else _QUIET)
    logging.captureWarnings(True)


def log_step(step: str) -> None:
    """Log that a step of the server's start begins, such as "loading the weights"."""
    logger.info("starting: %s", step)


def adopt_library_logs() -> None:
    """Make Transformers log through the root logger, instead of writing to stderr by itself.

    This imports Transformers, which takes seconds, so only processes that need it anyway call it.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


class Announcer:
    """A writer of the messages about a server's start: its version, its engine, its URL."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._has_json = options.log_format == "json"

    def announce_start(self) -> None:
        self._announce(f"Sensorium {__version__}: loading {self._options.model}", {})

    def announce_core(self, description: Rows) -> None:
        """Announce the rows that describe the engine, or a renderer, and those about media."""
        rows = [*description, *describe_media(self._options)]
        text = "the engine is ready" if self._has_json else format_rows(rows)
        self._announce(text, {"engine": dict(rows)})

    def announce_ready(self, url: str) -> None:
        line = f"Sensorium is ready: {url}"
        if not self._has_json:
            kind = (
                "it only renders prompts"
                if self._options.is_render_only
                else "OpenAI's API below /v1"
            )
            line += f"  ({kind}, documented at /docs)"
        self._announce(line, {"url": url})

    def _announce(self, text: str, fields: Mapping[str, object]) -> None:
        announce(text, self._has_json, fields)


def announce(text: str, has_json: bool, fields: Mapping[str, object] | None = None) -> None:
    """Print a message about the start of a process, or log it with `fields` if the log is JSON."""
    if has_json:
        logger.info(text, extra={"fields": fields or {}})
        return
    try:
        print(text, flush=True)
    except OSError:
        # The reader is gone, which is no reason not to serve. What is buffered must not raise once
        # more when the interpreter flushes it.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def describe_media(options: ServeOptions) -> Rows:
    """Return what a server announces about its frontends and its processing of media."""
    num_processes = options.media.mm_processor_pool_size
    pool = "in the frontend's own process"
    if num_processes:
        pool = "1 process" if num_processes == 1 else f"{num_processes} processes"
    if options.api_server_count > 1:
        pool += " each"
    reason = options.frontends_reason
    rows = [
        ("processor cache", _describe_cache(options)),
        ("frontends", f"{options.api_server_count}{reason and f' ({reason})'}"),
        ("media processing", pool),
    ]
    if options.media.mm_disk_cache is not None:
        size = f"{options.media.mm_disk_cache_gb:g} GiB"
        rows.append(("disk cache", f"{options.media.mm_disk_cache}, {size}"))
    if options.media.encoder is not None:
        above = options.media.encode_above
        kind = f"media of more than {above} bytes" if above else "all media"
        rows.append(("remote encoder", f"{options.media.encoder}, for {kind}"))
    return tuple(rows)


def _describe_cache(options: ServeOptions) -> str:
    if not options.media.capacity_bytes:
        return "off"
    kind = "in shared memory" if options.shm_capacity_bytes else "lru, next to the engine"
    if options.is_render_only:
        kind = "in each frontend" if options.api_server_count > 1 else "in the frontend"
    return f"{options.media.mm_processor_cache_gb:g} GiB, {kind}"


def format_rows(rows: Rows) -> str:
    """Return names and values as indented lines of text, with all values in one column."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
