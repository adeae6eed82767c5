"""What the tensors of an item must look like, learned from the processor itself.

Tensors that were made elsewhere are held against it before they reach a cache or an encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

import torch

from sensorium.multimodal.dummy_media import make_dummy_media
from sensorium.multimodal.processor import MultiModalProcessor
from sensorium.types.errors import RequestError

_Spec = Mapping[str, tuple[torch.dtype, int]]  # dtype and number of dimensions, by name


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
        if kwargs.keys() != spec.keys():
            given, expected = (", ".join(sorted(map(str, k))) for k in (kwargs.keys(), spec.keys()))
            raise RequestError(f"the tensors of a {modality} are {expected}, not {given}")
        for name, (dtype, num_dimensions) in spec.items():
            tensor = kwargs[name]
            if not isinstance(tensor, torch.Tensor):
                raise RequestError(f"{name} must be a tensor, not {type(tensor).__name__}")
            if tensor.layout is not torch.strided or tensor.is_meta:
                raise RequestError(f"{name} must be a plain tensor that holds its values")
            if (tensor.dtype, tensor.ndim) != (dtype, num_dimensions) or tensor.numel() == 0:
                raise RequestError(
                    f"{name} must be {dtype} with {num_dimensions} non-empty dimensions, not "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                )

    def _get_spec(self, modality: str) -> _Spec:
        with self._lock:
            if modality not in self._specs:
                media = make_dummy_media(modality, self._processor.sampling_rate or 0)
                item = self._processor.process_item(modality, media, {})
                self._specs[modality] = {
                    name: (tensor.dtype, tensor.ndim) for name, tensor in item.kwargs.items()
                }
            return self._specs[modality]
