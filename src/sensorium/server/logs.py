"""Sets up the logs of a server's process: text or JSON lines on stderr, with the process's name."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

import msgspec

from sensorium.server.options import LogFormat, LogLevel

logger = logging.getLogger(__name__)
# The level of libraries. At a lower one uvicorn would announce each of its starts, which the
# supervisor does already. uvicorn's access log is used as it is.
_QUIET = logging.WARNING
# The parent prints the resolved options of the engine for people, so its log lines are left out.
_PRINTED_ELSEWHERE = "sensorium.engine.build.builder"
_ACCESS_LOGGER = "uvicorn.access"


class _Handler(logging.StreamHandler[TextIO]):
    """A handler that writes to stderr and ignores failures to write.

    If a disk is full or a terminal is gone, the line is lost. No error is written about it, and
    none reaches the request that logs.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class TextFormatter(logging.Formatter):
    """A formatter of lines for people.

    `2026-01-31 12:34:56.789 INFO    core        sensorium.core.scheduler: text`
    """

    default_msec_format = "%s.%03d"

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process:<11} %(name)s: %(message)s")


class JsonFormatter(logging.Formatter):
    """A formatter that writes one JSON object per line.

    The fields that a call gives as `extra={"fields": {...}}` are put beside the text.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _format_utc(record.created),
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


def _format_utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def set_up_logging(
    process: str, *, log_format: LogFormat, log_level: LogLevel, access_log: bool = False
) -> None:
    """Set up the logs of this whole process.

    `process` is its name, such as "parent", "core" or "frontend-0".
    """
    handler = _Handler()
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    level = logging.getLevelNamesMapping()[log_level.upper()]
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(level, _QUIET))
    logging.getLogger("sensorium").setLevel(level)
    logging.getLogger(_PRINTED_ELSEWHERE).setLevel(level if log_level == "debug" else _QUIET)
    logging.getLogger(_ACCESS_LOGGER).setLevel(level if access_log else _QUIET)
    logging.captureWarnings(True)


def log_step(step: str) -> None:
    """Log a step of loading a model."""
    logger.info("starting: %s", step)


def adopt_library_logs() -> None:
    """Let Transformers log like everything else, instead of writing to stderr by itself.

    This imports Transformers, so it is for processes that need it anyway.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
