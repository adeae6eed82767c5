"""Warms up a core: computes dummy requests before the first real ones.

A rehearsal goes through the whole model: encoder, prompt, and some generated tokens. The first run
of an operation loads kernels, chooses algorithms, allocates workspaces and reads weights that are
mapped from a file. The first request must do none of that.

Nothing else remains. A scheduler of its own keeps the counters, prefixes and encoder outputs of the
engine as they are. The media is received by a cache that is thrown away, and encoder outputs are
neither looked up in a store nor put there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sensorium.core.scheduler import Scheduler
from sensorium.engine.core_process.engine_core import EngineCore
from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.types.errors import (
    CapacityError,
    ErrorRecord,
    FailedRequestError,
    RequestError,
    make_record,
)
from sensorium.types.multimodal import Transfer
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest

logger = logging.getLogger(__name__)


class Rehearsal:
    """A callable that computes dummy requests with a core's worker and a new scheduler."""

    def __init__(self, core: EngineCore, make_scheduler: Callable[[], Scheduler]) -> None:
        self._core = core
        self._make_scheduler = make_scheduler

    def __call__(self, request: EngineCoreRequest, transfer: Transfer) -> ErrorRecord | None:
        """Compute a request, and return the model's error or `None`; a refusal is not an error."""
        with _leaving_no_trace(self._core):
            scheduler = self._make_scheduler()
            core = EngineCore(scheduler, self._core.runner, self._core.payloads)
            try:
                core.add_request(request, transfer)
            except (RequestError, CapacityError) as error:
                logger.debug("a rehearsal is left out: %s", error)
                return None
            try:
                return _run(core)
            except Exception as error:  # the core must not end because of a dummy
                logger.debug("a rehearsal failed", exc_info=True)
                reason = f"{type(error).__name__}: {error}"
                return make_record(FailedRequestError(reason))
            finally:
                core.abort_requests(list(scheduler.requests))
                scheduler.encoder_cache.clear_cache()
                core.step()  # an empty step, in which the worker drops its tensors


def _run(core: EngineCore) -> ErrorRecord | None:
    outputs: list[EngineCoreOutput] = []
    while core.has_requests:
        outputs += core.step()
    return next((output.error for output in outputs if output.error is not None), None)


@contextmanager
def _leaving_no_trace(core: EngineCore) -> Iterator[None]:
    """Replace a core's media receiver and its store; restore them and its counts at the end."""
    payloads, encoders = core.payloads, core.runner.encoder_runner
    receiver, store = payloads.receiver, encoders.store
    counts = encoders.num_encoded, encoders.num_loaded
    payloads.receiver, encoders.store = MirrorReceiver(), None
    try:
        yield
    finally:
        payloads.receiver, encoders.store = receiver, store
        encoders.num_encoded, encoders.num_loaded = counts
