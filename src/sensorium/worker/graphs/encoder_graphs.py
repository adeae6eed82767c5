"""Replays encoders as CUDA graphs, for media items of shapes that come again.

An encoder launches hundreds of kernels for one media item. On many machines the host needs more
time to launch them than the device needs to compute them, so the device waits. A replay is one
launch. A graph serves one media item of one shape. Which shapes users send is not known at start,
so an encoder is captured while the engine runs, when a shape has come a few times. A step with
several items of a modality gives the device enough to do, and is never replayed.

A captured encoder reads its numbers from fixed memory. Tensors of integers and bools, for example
the grid of a picture, decide what an encoder computes, so a graph serves only equal ones. They and
all that is derived from them on the host stay in the device's memory with the graph.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sensorium.models.adapter import ModelAdapter
from sensorium.models.seams.host_copies import HostCopies, following
from sensorium.types.multimodal import MultiModalKwargsItem
from sensorium.worker.graphs.recorder import Break, Recorder, Recording, find_distance

logger = logging.getLogger(__name__)

# A shape that has come this often is captured when it comes once more.
NUM_BEFORE_CAPTURE = 2
_MAX_GRAPHS = 16
_MAX_COUNTED = 1024  # shapes
# An encoder that needs more memory computes for so long that launching it costs little.
_MAX_WORK_BYTES = 1 << 30
_SPARE_BYTES = 1 << 30  # stay free for other work when a graph is captured


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A CUDA graph of an encoder for one shape, and the fixed memory that it uses."""

    recording: Recording
    inputs: Mapping[str, torch.Tensor]
    output: torch.Tensor
    copies: HostCopies  # holds tensors that the graph reads

    def replay(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the embeddings of a media item from the tensors that its encoder gets."""
        for name, tensor in inputs.items():
            if tensor.is_floating_point():
                self.inputs[name].copy_(tensor)
        self.recording.replay()
        return self.output.clone()  # the next replay overwrites the output


class EncoderGraphs:
    """A set of CUDA graphs that compute the embeddings of one media item at a time.

    There is one graph for each shape that came often. The graph that was not used for the longest
    time is dropped for a new one.
    """

    def __init__(self, adapter: ModelAdapter, recorder: Recorder) -> None:
        self._adapter = adapter
        self._recorder = recorder
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._counts: OrderedDict[Hashable, int] = OrderedDict()  # how often a shape has come
        self._refused: dict[str, str] = {}  # modality -> why its encoder can't be captured

    def encode(
        self, modality: str, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the embeddings of media items, as `ModelAdapter.encode` does.

        They are replayed if there is one item and a graph for its shape.
        """
        adapter = self._adapter
        if len(items) > 1 or modality in self._refused:
            return adapter.encode(modality, items, num_embeds)
        batch = adapter.make_encoder_batch(modality, items)
        key = (modality, tuple(num_embeds), _describe(batch))
        captured = self._captured.get(key)
        if captured is not None:
            self._captured.move_to_end(key)
            return [captured.replay(adapter.send_batch(batch))]
        if self._count(key) <= NUM_BEFORE_CAPTURE:
            return adapter.encode(modality, items, num_embeds)
        return [self._encode_and_capture(key, modality, items, num_embeds)]

    def _count(self, key: Hashable) -> int:
        """Count a shape, and return how often it has come."""
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > _MAX_COUNTED:
            self._counts.popitem(last=False)
        return count

    def _encode_and_capture(
        self,
        key: Hashable,
        modality: str,
        items: Sequence[MultiModalKwargsItem],
        num_embeds: Sequence[int],
    ) -> torch.Tensor:
        """Return the embeddings of a media item, and capture a graph of its encoder if possible."""
        self._counts.pop(key)  # without a graph, the next attempt comes as late as this one
        adapter = self._adapter
        peak = _PeakMemory(adapter.device)
        [expected] = adapter.encode(modality, items, num_embeds)
        if not peak.has_room_again():
            return expected
        try:
            captured = self._capture(modality, items, num_embeds, torch.zeros_like(expected))
            batch = adapter.make_encoder_batch(modality, items)
            found = captured.replay(adapter.send_batch(batch))
        except Exception as error:  # models raise all kinds of errors, and CUDA does
            logger.debug("capturing the %s encoder failed", modality, exc_info=True)
            self._refuse(modality, error)
            return expected
        distance = find_distance(found, expected, adapter.dtype)
        if distance is not None:
            self._refuse(modality, f"a replay is off by {distance}")
            return expected
        self._captured[key] = captured
        if len(self._captured) > _MAX_GRAPHS:
            self._captured.popitem(last=False)
        logger.debug("captured a CUDA graph of the %s encoder for one more shape", modality)
        return expected

    def _capture(
        self,
        modality: str,
        items: Sequence[MultiModalKwargsItem],
        num_embeds: Sequence[int],
        output: torch.Tensor,
    ) -> _Captured:
        """Capture a graph that writes the embeddings of an item like this one to `output`.

        Raises an error if the encoder waits for the device.
        """
        adapter = self._adapter
        # A model may change its inputs, and those of the item are cached.
        item = {name: tensor.clone() for name, tensor in items[0].items()}
        batch = adapter.make_encoder_batch(modality, [item])
        inputs = adapter.send_batch(batch)
        with adapter.keeping_host_copies(inputs, batch) as copies, following(copies):
            with _forbid_waiting(adapter.device):
                adapter.run_encoder(modality, inputs, [item], num_embeds)
            copies.complete()
            # Integers stay the same tensors, by which their copies on the host are found. The fixed
            # memory of the others has no content yet, so a replay can't be right by chance.
            fixed = {
                name: torch.zeros_like(tensor) if tensor.is_floating_point() else tensor
                for name, tensor in inputs.items()
            }

            def compute(_: Break) -> None:
                [embeds] = adapter.run_encoder(modality, fixed, [item], num_embeds)
                output.copy_(embeds)

            recording = self._recorder.record(compute)
        return _Captured(recording=recording, inputs=fixed, output=output, copies=copies)

    def _refuse(self, modality: str, reason: object) -> None:
        words = " ".join(str(reason).split())[:300]
        self._refused[modality] = words
        logger.info(
            "the %s encoder runs without CUDA graphs, because it can't be captured: %s",
            *(modality, words),
        )


def _describe(batch: Mapping[str, torch.Tensor]) -> Hashable:
    """Return a key that is equal for batches that one graph serves.

    Shapes and types must be equal, and all numbers that are integers.
    """
    return tuple(
        (
            name,
            tuple(tensor.shape),
            tensor.dtype,
            None if tensor.is_floating_point() else tensor.numpy().tobytes(),
        )
        for name, tensor in sorted(batch.items())
    )


@contextmanager
def _forbid_waiting(device: torch.device) -> Iterator[None]:
    """Make torch raise an error where it would wait for the device, inside a `with`.

    A capture would fail there too, but such a failure can leave torch's memory in disorder.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode may change in the future
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _PeakMemory:
    """A measurement of the most device memory that the work after its creation has used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def has_room_again(self) -> bool:
        """Return whether a graph may reserve as much memory as the work has used."""
        if self._device.type != "cuda":
            return True
        used = torch.cuda.max_memory_allocated(self._device) - self._before
        free, _ = torch.cuda.mem_get_info(self._device)
        return used <= _MAX_WORK_BYTES and used + _SPARE_BYTES <= free
