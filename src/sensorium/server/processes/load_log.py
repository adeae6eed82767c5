"""The parent's line in the log about what all processes do, while they do something."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from sensorium.server.metrics.collect import Files, Values
from sensorium.server.metrics.log_line import LogLine

logger = logging.getLogger(__name__)
_PAUSE_S = 10.0


async def log_load(metrics_directory: Path) -> None:
    """Until it is cancelled."""
    files = Files(metrics_directory)
    line = LogLine(lambda: Values(files), started=time.monotonic())
    while True:
        await asyncio.sleep(_PAUSE_S)
        try:
            # In a thread: there are many files, and nothing else may wait for them.
            text = await asyncio.to_thread(line.take, time.monotonic())
        except Exception:  # a server must not end because of a line in its log
            logger.warning("the metrics could not be read", exc_info=True)
            continue
        if text is not None:
            logger.info("%s", text)
