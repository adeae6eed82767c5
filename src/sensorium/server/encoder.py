"""The process of a remote encoder: loads a model's encoders, and serves engines over a socket."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass, field, replace
from types import FrameType

from sensorium import __version__
from sensorium.engine.assembly.options import EncodeOptions, LoadingOptions, MediaOptions
from sensorium.server.logs import Rows, adopt_library_logs, announce, format_rows, log_step
from sensorium.server.options import LogFormat
from sensorium.types.errors import SensoriumError
from sensorium.utils.process import reporting_steps, without_collection

logger = logging.getLogger(__name__)
_GRACE_S = 20.0  # for items that are being encoded when the encoder is stopped
_LOOK_S = 1.0
_POOL_LOOK_S = 0.02


class EncoderFailedError(SensoriumError):
    """An error that means that the encoder can't continue, for example after its device failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderProcessOptions:
    encode: EncodeOptions
    loading: LoadingOptions = field(default_factory=LoadingOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    log_format: LogFormat = "text"


def run_encoder(options: EncoderProcessOptions) -> None:
    """Load the encoders of a model, and serve engines until SIGINT or SIGTERM.

    Items that are being encoded at the signal are finished; a second one ends the process at once.
    Raise a `SensoriumError` if the encoder can't be started, or if it fails.
    """
    has_json = options.log_format == "json"
    announce(f"Sensorium {__version__}: loading the encoders of {options.loading.model}", has_json)
    with without_collection(), reporting_steps(log_step):
        adopt_library_logs()
        from sensorium.engine.assembly.encoder import build_encoder
        from sensorium.engine.encoding.listener import EncoderListener
        from sensorium.models.checkpoint import blame_checkpoint

        loading = replace(options.loading, use_tqdm_on_load=not has_json)
        with blame_checkpoint(loading.model):
            encoder = build_encoder(loading, options=options.encode, media=options.media)
    try:
        stop = _catch_signals()
        listener = EncoderListener(
            options.encode.socket,
            encoder.service,
            encoder.identity,
            max_connections=options.encode.max_connections,
        )
        try:
            pool = encoder.frontend.media_parts.pool
            if pool is not None:
                pool.start()
                while not pool.is_complete and not stop.wait(_POOL_LOOK_S):
                    pass
            rows = _describe(options, str(encoder.hf_model.device), encoder.identity.dtype)
            text = "the encoder is ready" if has_json else format_rows(rows)
            announce(text, has_json, {"encoder": dict(rows)})
            url = f"unix:{options.encode.socket}"
            announce(f"Sensorium's encoder is ready: {url}", has_json, {"url": url})
            while not stop.wait(_LOOK_S):
                if encoder.towers.has_failed.is_set():
                    raise EncoderFailedError("the encoder has failed; the log has the reason")
        finally:
            listener.close(_GRACE_S)
    finally:
        has_ended = encoder.close()
    if not has_ended:
        announce("the encoder does not end by itself: its process is ended", has_json)
        sys.stdout.flush()
        os._exit(0)  # a normal exit would release the device while a thread still uses it


def _catch_signals() -> threading.Event:
    """Return an event that the first SIGINT or SIGTERM sets; the second ends the process."""
    stop = threading.Event()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stop


def _describe(options: EncoderProcessOptions, device: str, dtype: str) -> Rows:
    media = options.media
    num_processes = media.mm_processor_pool_size
    pool = "1 process" if num_processes == 1 else f"{num_processes} processes"
    return (
        ("model", f"{options.loading.model}, without its decoder"),
        ("device", f"{device}, {dtype.removeprefix('torch.')}"),
        ("kept outputs", f"{media.mm_processor_cache_gb:g} GiB"),
        ("media processing", pool if num_processes else "in this process"),
        ("at once", f"{options.encode.max_items} items at most"),
    )
