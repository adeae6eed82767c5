"""What the tensors of an item must look like, learned from the processor itself.

Tensors that were made elsewhere are held against it before they reach a cache or an encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import torch

from sensorium.multimodal.dummy_media import make_dummy_media
from sensorium.multimodal.processor import MultiModalProcessor
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalKwargsItem


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """`tensors`: dtype and number of dimensions, by name. `grids`: pairs of a tensor of sizes and
    the one whose rows these count: larger sizes would make an encoder take any amount of memory.
    """

    tensors: Mapping[str, tuple[torch.dtype, int]]
    grids: tuple[tuple[str, str], ...]


class ItemSpecs:
    """Safe to use from several threads."""

    def __init__(self, processor: MultiModalProcessor) -> None:
        self._processor = processor
        self._specs: dict[str, _Spec] = {}
        self._lock = Lock()

    def check(self, modality: str, kwargs: object) -> None:
        """A `RequestError` that names the tensor which does not fit."""
        if not isinstance(kwargs, Mapping):
            raise RequestError(f"tensors come by name, not as {type(kwargs).__name__}")
        if modality not in self._processor.modalities:
            raise RequestError(f"this model takes no {modality}")
        spec = self._get_spec(modality)
        if kwargs.keys() != spec.tensors.keys():
            given, expected = (", ".join(sorted(map(str, k))) for k in (kwargs, spec.tensors))
            raise RequestError(f"the tensors of a {modality} are {expected}, not {given}")
        for name, (dtype, num_dimensions) in spec.tensors.items():
            tensor = kwargs[name]
            if not isinstance(tensor, torch.Tensor):
                raise RequestError(f"{name} must be a tensor, not {type(tensor).__name__}")
            if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
                raise RequestError(f"{name} must be a plain tensor that holds its values")
            if (tensor.dtype, tensor.ndim) != (dtype, num_dimensions) or tensor.numel() == 0:
                raise RequestError(
                    f"{name} must be {dtype} with {num_dimensions} non-empty dimensions, not "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        for name, rows in spec.grids:
            if not _counts_rows(kwargs[name], kwargs[rows]):
                raise RequestError(f"{name} does not count the rows of {rows}")

    def _get_spec(self, modality: str) -> _Spec:
        with self._lock:
            if modality not in self._specs:
                media = make_dummy_media(modality, self._processor.sampling_rate or 0)
                item = self._processor.process_item(modality, media, {})
                self._specs[modality] = _make_spec(item.kwargs)
            return self._specs[modality]


def _make_spec(kwargs: MultiModalKwargsItem) -> _Spec:
    return _Spec(
        tensors={name: (tensor.dtype, tensor.ndim) for name, tensor in kwargs.items()},
        grids=tuple(
            (name, rows)
            for name, grid in kwargs.items()
            for rows, tensor in kwargs.items()
            if name.endswith("grid_thw") and _counts_rows(grid, tensor)
        ),
    )


def _counts_rows(grid: torch.Tensor, tensor: torch.Tensor) -> bool:
    """In floating point: a product of large whole numbers may come out as any other one."""
    sizes = grid.double()
    return bool((sizes >= 1).all()) and float(sizes.prod(-1).sum()) == len(tensor)
