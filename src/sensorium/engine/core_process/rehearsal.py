"""Computes dummy requests with a core, before it has real ones, so that these find it warm.

A rehearsal goes through the whole model: encoder, prompt, and some generated tokens. What computes
for the first time loads kernels, chooses algorithms, allocates workspaces and reads weights that
are mapped from a file. None of that may be left to the first request.

Nothing else remains. The scheduler is one of its own, so that no counter, no prefix and no encoder
output of the engine changes. The media is received by a cache that is thrown away, and encoder
outputs are neither looked up in a store nor put there.
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
    """A callable that computes dummy requests with the worker of a core that has none.

    `make_scheduler` returns a new scheduler like that of the core.
    """

    def __init__(self, core: EngineCore, make_scheduler: Callable[[], Scheduler]) -> None:
        self._core = core
        self._make_scheduler = make_scheduler

    def __call__(self, request: EngineCoreRequest, transfer: Transfer) -> ErrorRecord | None:
        """Compute a request to its end, and return its error, or `None` if the model has none.

        A dummy that is refused, because there is no room for it, is no error of the model.
        """
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
    """Give a core another receiver of media and no store in the `with` block, and keep its counts.

    All that is changed is what it was before at the end of the block.
    """
    payloads, encoders = core.payloads, core.runner.encoder_runner
    receiver, store = payloads.receiver, encoders.store
    counts = encoders.num_encoded, encoders.num_loaded
    payloads.receiver, encoders.store = MirrorReceiver(), None
    try:
        yield
    finally:
        payloads.receiver, encoders.store = receiver, store
        encoders.num_encoded, encoders.num_loaded = counts
