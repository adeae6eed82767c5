"""Runs a model's encoders in one thread, in batches of the items that wait.

Owns the device. Items of the same shape that wait together are encoded together, as in a step of an
engine. An item that can't be encoded fails alone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from sensorium.models.hf_model import HfModel
from sensorium.types.errors import EncoderLostError, RequestError
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange, ProcessedItem
from sensorium.worker.encoder_runner import EncoderCache, EncoderJob, EncoderRunner

logger = logging.getLogger(__name__)
_LOST = "the encoder has failed: send the request again"


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    item: ProcessedItem
    encoded: Future[torch.Tensor] = field(default_factory=Future)

    @property
    def num_embeds(self) -> int:
        return 0 if self.item.layout is None else self.item.layout.num_embeds


class TowerThread:
    """A thread that runs the encoders of a model, in batches of at most `max_embeds` embeddings.

    An item with more embeddings than that is encoded alone. `has_failed` is set when the device or
    the thread itself has failed. Then nothing can be encoded any more, and the process should end.
    """

    def __init__(self, hf_model: HfModel, *, max_embeds: int) -> None:
        self._cache = EncoderCache()
        self._runner = EncoderRunner(hf_model, self._cache)
        self._hf_model = hf_model
        self._max_embeds = max_embeds
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._next: _Waiting | None = None  # the item that did not fit into the last batch
        self.has_failed = threading.Event()
        self._lock = threading.Lock()  # so that nothing is queued after the end
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="towers", daemon=True)
        self._thread.start()

    @property
    def num_encoded(self) -> int:
        return self._runner.num_encoded

    def submit(self, item: ProcessedItem) -> Future[torch.Tensor]:
        """Return a future of the item's encoder output [num_embeds, width] in host memory.

        It fails with a `RequestError` if the item can't be encoded.
        """
        waiting = _Waiting(item)
        with self._lock:
            if self._is_closed or self.has_failed.is_set():
                waiting.encoded.set_exception(EncoderLostError(_LOST))
            else:
                self._queue.put(waiting)
        return waiting.encoded

    def close(self, timeout_s: float) -> bool:
        """End the thread after the current batch. Items that still wait then fail.

        Return False if that takes longer than `timeout_s` seconds: a device may hang.
        """
        with self._lock:
            self._is_closed = True
            self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (batch := self._take_batch()) is not None:
                self._encode(batch)
                del batch  # its items must not stay in memory until the next one comes
        except Exception:
            logger.exception("the encoder has failed")
        finally:
            with self._lock:
                self.has_failed.set()
            self._fail_rest()

    def _take_batch(self) -> list[_Waiting] | None:
        """Wait for an item; return it with the next that fit into a batch, or None at the end."""
        first, self._next = self._next or self._queue.get(), None
        if first is None or self._is_closed:
            self._next = first
            return None
        batch, total = [first], first.num_embeds
        while not self._is_closed:
            try:
                other = self._queue.get_nowait()
            except queue.Empty:
                break
            if other is None:
                self._queue.put(None)
                break
            total += other.num_embeds
            if total > self._max_embeds:
                self._next = other
                break
            batch.append(other)
        return batch

    def _encode(self, batch: Sequence[_Waiting]) -> None:
        jobs = {str(place): waiting for place, waiting in enumerate(batch)}
        try:
            with torch.inference_mode():
                outcome = self._runner.run([_make_job(*each) for each in jobs.items()])
                if outcome.failed and self._hf_model.device.type == "cuda":
                    torch.cuda.synchronize(self._hf_model.device)  # raises if the device has failed
                done = {key: self._cache[key].cpu() for key in jobs if key not in outcome.failed}
        except BaseException:
            for waiting in batch:
                waiting.encoded.set_exception(EncoderLostError(_LOST))
            raise
        finally:
            for key in jobs:
                self._cache.drop(key)
        for key, waiting in jobs.items():
            if key in done:
                waiting.encoded.set_result(done[key])
            else:
                waiting.encoded.set_exception(RequestError(outcome.failed[key]))

    def _fail_rest(self) -> None:
        rest = [self._next]
        while not self._queue.empty():
            rest.append(self._queue.get())
        for waiting in rest:
            if waiting is not None:
                waiting.encoded.set_exception(EncoderLostError(_LOST))


def _make_job(key: str, waiting: _Waiting) -> EncoderJob:
    item = waiting.item
    feature = MultiModalFeatureSpec(
        modality=item.modality,
        mm_hash=item.mm_hash,
        mm_position=PlaceholderRange(offset=0, length=waiting.num_embeds),
    )
    return EncoderJob(key=key, feature=feature, item=item.kwargs)
