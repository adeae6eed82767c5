"""Replays encoders as CUDA graphs, for media items with shapes that recur.

An encoder launches hundreds of kernels for one media item. On many machines the host needs more
time to launch them than the device needs to compute them, so the device waits. A replay is one
launch. A graph serves one media item of one shape. Which shapes users send is not known at start,
so an encoder is captured while the engine runs, when a shape has occurred a few times. A step with
several items of a modality gives the device enough to do, and is never replayed.

A captured encoder reads its floating-point inputs from fixed memory. Integers and bools, like the
grid of a picture, decide what an encoder computes, so a graph serves only items with equal ones.
They, and all that is derived from them on the host, stay on the device with the graph.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import torch

from sensorium.models.hf_model import HfModel
from sensorium.models.seams.host_copies import HostCopies, following
from sensorium.types.multimodal import MultiModalKwargsItem
from sensorium.worker.graphs.recorder import Break, Recorder, Recording

logger = logging.getLogger(__name__)

# A shape that has occurred this often is captured when it occurs once more.
NUM_BEFORE_CAPTURE = 2
_MAX_GRAPHS = 16
_MAX_COUNTED = 1024  # shapes
_COUNTS_UNTIL_AGED = 4096  # after so many media items all counts are halved
_MAX_KEY_BYTES = 1 << 20  # of integers in an item; with more, an item has no graph
# If encoders of so many shapes of a modality can't be captured, no more are tried.
_NUM_REFUSALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A CUDA graph of an encoder for one shape, and the fixed memory that it uses."""

    recording: Recording
    inputs: Mapping[str, torch.Tensor]
    output: torch.Tensor
    copies: HostCopies  # holds tensors that the graph reads

    def replay(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the embeddings of a media item from its encoder's inputs."""
        for name, tensor in inputs.items():
            if tensor.is_floating_point():
                self.inputs[name].copy_(tensor)
        self.recording.replay()
        return self.output.clone()  # the next replay overwrites the output


class EncoderGraphs:
    """A set of CUDA graphs that compute the embeddings of one media item at a time.

    There is one graph for each shape that occurred often. If there is no room for another one, the
    shape that occurred least gives up its graph, but only to one that occurred twice as often.
    Otherwise graphs would be captured all the time when there are more shapes than room.

    A capture changes a setting of the whole process for a moment: every wait for the device is an
    error. So this may be used only in a process that does nothing else with the device.
    """

    def __init__(self, hf_model: HfModel, recorder: Recorder, *, max_bytes: int) -> None:
        self._hf_model = hf_model
        self._recorder = recorder
        self._captured: dict[Hashable, _Captured] = {}
        # How often each shape has occurred, the latest one last; captured shapes are never missing.
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        self._num_counted = 0
        self._refused_keys: set[Hashable] = set()
        self._refusals: dict[str, list[str]] = {}  # modality -> why encoders were not captured
        self._pool = _PoolMemory(hf_model.device, max_bytes)

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    @property
    def refused(self) -> dict[str, str]:
        """The modalities with encoders that can't be captured, and the last reason of each."""
        return {
            modality: reasons[-1]
            for modality, reasons in self._refusals.items()
            if len(reasons) >= _NUM_REFUSALS
        }

    def encode(
        self, modality: str, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the embeddings of media items like `HfModel.encode`, with a graph if one fits."""
        hf_model = self._hf_model
        if len(items) > 1 or len(self._refusals.get(modality, ())) >= _NUM_REFUSALS:
            return hf_model.encode(modality, items, num_embeds)
        batch = hf_model.make_encoder_batch(modality, items)
        numbers = _describe(batch)
        if numbers is None:
            return hf_model.encode(modality, items, num_embeds)
        key = (modality, tuple(num_embeds), numbers)
        self._count(key)
        captured = self._captured.get(key)
        if captured is not None:
            return [captured.replay(hf_model.send_batch(batch))]
        if not self._is_due(key):
            return hf_model.encode(modality, items, num_embeds)
        return [self._encode_and_capture(key, modality, items, num_embeds)]

    def _count(self, key: Hashable) -> None:
        self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > _MAX_COUNTED:
            others = (name for name in self._counts if name not in self._captured)
            del self._counts[next(others)]
        self._num_counted += 1
        if self._num_counted % _COUNTS_UNTIL_AGED == 0:
            for name in self._counts:
                self._counts[name] //= 2

    def _is_due(self, key: Hashable) -> bool:
        """Return whether a shape occurred often enough to be captured."""
        count = self._counts[key]
        if count <= NUM_BEFORE_CAPTURE or key in self._refused_keys:
            return False
        if len(self._captured) < _MAX_GRAPHS:
            return True
        return count > 2 * min(self._counts[name] for name in self._captured)

    def _encode_and_capture(
        self,
        key: Hashable,
        modality: str,
        items: Sequence[MultiModalKwargsItem],
        num_embeds: Sequence[int],
    ) -> torch.Tensor:
        """Return the embeddings of a media item, and capture a graph of its encoder if possible."""
        hf_model = self._hf_model
        self._pool.begin()
        [expected] = hf_model.encode(modality, items, num_embeds)
        # NaN and infinity can't be compared with a replay; the caller handles them.
        if not self._pool.has_room() or not bool(torch.isfinite(expected).all()):
            self._counts[key] = 0  # the next attempt comes as late as this one
            return expected
        try:
            captured = self._capture(modality, items, num_embeds, torch.zeros_like(expected))
            batch = hf_model.make_encoder_batch(modality, items)
            found = captured.replay(hf_model.send_batch(batch))
            if (distance := _find_distance(found, expected, hf_model.dtype)) is not None:
                raise RuntimeError(f"a replay is off by {distance}")
        except torch.OutOfMemoryError:
            self._counts[key] = 0
            return expected
        except Exception as error:  # models raise all kinds of errors, and CUDA does
            logger.debug("capturing the %s encoder failed", modality, exc_info=True)
            self._refuse(key, modality, error)
            return expected
        finally:
            self._pool.end()
        if len(self._captured) >= _MAX_GRAPHS:
            del self._captured[min(self._captured, key=self._counts.__getitem__)]
        self._captured[key] = captured
        logger.debug("captured a CUDA graph of the %s encoder for one more shape", modality)
        return expected

    def _capture(
        self,
        modality: str,
        items: Sequence[MultiModalKwargsItem],
        num_embeds: Sequence[int],
        output: torch.Tensor,
    ) -> _Captured:
        """Capture a graph that encodes items like this one; raise an error if the encoder waits."""
        hf_model = self._hf_model
        # A model may change its inputs, and those of the item are cached.
        item = {name: tensor.clone() for name, tensor in items[0].items()}
        batch = hf_model.make_encoder_batch(modality, [item])
        inputs = hf_model.send_batch(batch)
        with hf_model.keeping_host_copies(inputs, batch) as copies, following(copies):
            with _forbid_waiting(hf_model.device):
                hf_model.run_encoder(modality, inputs, [item], num_embeds)
            copies.complete()
            # Tensors of integers are kept, because they are the keys of their host copies. The
            # fixed memory of others has no content yet, so a replay can't be right by chance.
            fixed = {
                name: torch.zeros_like(tensor) if tensor.is_floating_point() else tensor
                for name, tensor in inputs.items()
            }

            def compute(_: Break) -> None:
                [embeds] = hf_model.run_encoder(modality, fixed, [item], num_embeds)
                output.copy_(embeds)

            recording = self._recorder.record(compute)
        return _Captured(recording=recording, inputs=fixed, output=output, copies=copies)

    def _refuse(self, key: Hashable, modality: str, reason: object) -> None:
        """Record that a shape can't be captured; after a few such shapes, give up the modality."""
        self._refused_keys.add(key)
        words = " ".join(str(reason).split())[:300]
        reasons = self._refusals.setdefault(modality, [])
        reasons.append(words)
        if len(reasons) < _NUM_REFUSALS:
            return
        for name in [name for name in self._counts if name[0] == modality]:  # type: ignore[index]
            del self._counts[name]
            self._captured.pop(name, None)
            self._refused_keys.discard(name)
        logger.info(
            "the %s encoder runs without CUDA graphs, because it can't be captured: %s",
            *(modality, words),
        )


def _describe(batch: Mapping[str, torch.Tensor]) -> Hashable | None:
    """Return a key that is equal for batches that one graph serves, or None if it is too large."""
    integers = [tensor for tensor in batch.values() if not tensor.is_floating_point()]
    if sum(tensor.nbytes for tensor in integers) > _MAX_KEY_BYTES:
        return None
    return tuple(
        (
            name,
            tuple(tensor.shape),
            tensor.dtype,
            b"" if tensor.is_floating_point() else blake2b(tensor.numpy().tobytes()).digest(),
        )
        for name, tensor in sorted(batch.items())
    )


def _find_distance(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Return how much two embeddings of an item differ, or None if it is only rounding.

    A replay runs the same kernels on the same numbers. Only what the host computes from integers
    may be rounded in another way. The largest relative difference of a row counts.
    """
    rows, others = expected.float(), found.float()
    distances = (others - rows).norm(dim=-1) / rows.norm(dim=-1).clamp_min(1e-6)
    distance = float(distances.max()) if len(distances) else 0.0
    is_near = distance <= max(4 * torch.finfo(dtype).eps, 1e-4)  # false for NaN
    return None if is_near else f"{distance:.3g}"


@contextmanager
def _forbid_waiting(device: torch.device) -> Iterator[None]:
    """Make torch raise an error where it would wait for the device, inside a `with`.

    A capture would fail there as well, but such a failure can leave torch's memory in disorder.
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


class _PoolMemory:
    """A measurement of the memory that graphs take on the device."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self._device = device
        self._max_bytes = max_bytes  # for all graphs, and for the work of one encoder
        self._num_bytes = 0  # taken by all captures so far
        self._allocated = self._reserved = 0  # by torch, before an attempt

    def begin(self) -> None:
        """Begin to measure how much memory an encoder uses for its work."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._allocated = torch.cuda.memory_allocated(self._device)

    def has_room(self) -> bool:
        """Return whether graphs may take as much memory as the work since `begin` has used.

        Memory that is taken between this call and `end` counts as memory of graphs.
        """
        if self._device.type != "cuda":
            return True
        used = torch.cuda.max_memory_allocated(self._device) - self._allocated
        self._reserved = torch.cuda.memory_reserved(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        return used <= min(self._max_bytes, free) and self._num_bytes <= self._max_bytes

    def end(self) -> None:
        """Record how much memory a capture has taken."""
        if self._device.type == "cuda":
            self._num_bytes += torch.cuda.memory_reserved(self._device) - self._reserved
