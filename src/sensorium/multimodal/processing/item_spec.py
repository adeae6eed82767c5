"""Rules for the tensors of a processed item, found by running the model's processor on samples.

Tensors that a client or a store gives are checked by these rules before they reach a cache or an
encoder. An encoder relies on the sizes, masks and positions that describe an item. If these do not
fit the item's other tensors, the encoder could take any amount of memory, or read beyond a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any

import torch

from sensorium.multimodal.processing.dummy_media import make_varied_media
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ENCODED, MultiModalKwargsItem, ProcessedItem
from sensorium.utils.lru import LruCache

_Dimension = tuple[str, int]  # the name of a tensor, and the index of one of its dimensions
_MAX_OPTION_SETS = 16  # of the processor, for which rules of stored items are remembered
_MAX_SIZES = 3  # numbers in a tensor that describes an item as a whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """A rule for one tensor of a processed media item: its dtype, its shape, and its values."""

    dtype: torch.dtype
    sizes: tuple[int | None, ...]  # of each dimension; None: any size from 1 on
    is_mask: bool = False  # it holds zeros and ones
    # It holds positions below the size of the dimension before the last, or -1 for none.
    is_position: bool = False

    def check(self, name: str, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise RequestError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            raise RequestError(f"{name} must be a plain tensor: dense, not nested, not meta")
        if tensor.dtype != self.dtype or not self._fits(tuple(tensor.shape)):
            raise RequestError(
                f"{name} must be {self.dtype} of shape {self._show()} (*: any size from 1 on), not "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        if self.is_mask and not bool(((tensor == 0) | (tensor == 1)).all()):
            raise RequestError(f"{name} must hold zeros and ones")
        if self.is_position and not bool(((tensor >= -1) & (tensor < tensor.shape[-2])).all()):
            raise RequestError(f"{name} must hold positions below {tensor.shape[-2]}, or -1")

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.sizes) and all(
            size >= 1 if own is None else size == own
            for size, own in zip(shape, self.sizes, strict=True)
        )

    def _show(self) -> str:
        return f"({', '.join('*' if size is None else str(size) for size in self.sizes)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSpec:
    """The rules for all tensors of a processed media item, for one modality."""

    tensors: Mapping[str, TensorRule]
    links: tuple[tuple[_Dimension, _Dimension], ...]  # dimensions that must have equal sizes
    # Pairs of tensors: the product of the numbers in the first one counts the rows of the second.
    grids: tuple[tuple[str, str], ...] = ()
    merge_size: int = 1  # heights and widths of a grid are multiples of it
    # Tensor -> (n, m): the encoder makes n embeddings of each m values in this tensor.
    yields: Mapping[str, tuple[int, int]]

    def check(self, modality: str, kwargs: Mapping[str, Any], num_embeds: int | None) -> None:
        if kwargs.keys() != self.tensors.keys():
            given, expected = (", ".join(sorted(map(str, k)))[:300] for k in (kwargs, self.tensors))
            raise RequestError(f"the tensors for {modality} must be {expected}, not {given}")
        self._check_some(kwargs)
        for name, (embeds, numbers) in self.yields.items():
            if num_embeds is not None and kwargs[name].numel() * embeds != num_embeds * numbers:
                raise RequestError(
                    f"{name} of shape {tuple(kwargs[name].shape)} makes "
                    f"{kwargs[name].numel() * embeds // numbers} embeddings, not {num_embeds}"
                )

    def check_encoded(self, modality: str, kwargs: Mapping[str, Any], num_embeds: int) -> None:
        """Check the small tensors of an item that come with its encoder output.

        If a grid of sizes is among them, the sizes must be those of an item with `num_embeds`
        embeddings.
        """
        if unknown := kwargs.keys() - self.tensors.keys():
            raise RequestError(f"{modality} has no tensor {min(unknown)[:200]!r}")
        self._check_some(kwargs)
        for name, rows in self.grids:
            if name not in kwargs or rows in kwargs or rows not in self.yields:
                continue
            embeds, numbers = self.yields[rows]
            in_row = [size for size in self.tensors[rows].sizes[1:] if size is not None]
            if len(in_row) < len(self.tensors[rows].sizes) - 1:
                continue  # the rows may have any size
            num_rows = _count_rows(kwargs[name])
            if num_rows is None or num_rows * prod(in_row) * embeds != num_embeds * numbers:
                raise RequestError(f"the sizes in {name} do not give {num_embeds} embeddings")

    def _check_some(self, kwargs: Mapping[str, Any]) -> None:
        """Check some tensors of an item by those rules that concern no missing tensor."""
        for name, tensor in kwargs.items():
            self.tensors[name].check(name, tensor)
        for (name, index), (other, other_index) in self.links:
            if not {name, other} <= kwargs.keys():
                continue
            if kwargs[name].shape[index] != kwargs[other].shape[other_index]:
                raise RequestError(
                    f"{name} of shape {tuple(kwargs[name].shape)} does not fit {other} of "
                    f"shape {tuple(kwargs[other].shape)}"
                )
        for name, rows in self.grids:
            if name not in kwargs:
                continue
            if rows in kwargs and not _counts_rows(kwargs[name], kwargs[rows]):
                raise RequestError(f"the sizes in {name} do not give the number of rows of {rows}")
            if self.merge_size > 1 and bool((kwargs[name][..., 1:] % self.merge_size).any()):
                raise RequestError(
                    f"the heights and widths in {name} must be multiples of {self.merge_size}"
                )


class ItemSpecs:
    """A thread-safe check of items that a client or another process has processed.

    A modality's rules are found by processing sample media, when it is first checked. `lock` is
    held meanwhile. It may be `None` if nothing else uses the processor.
    """

    def __init__(
        self,
        processor: MultiModalProcessor,
        processor_kwargs: Mapping[str, Any] | None = None,
        *,
        lock: Lock | None = None,
    ) -> None:
        self._processor = processor
        self._processor_lock = nullcontext() if lock is None else lock
        self._processor_kwargs = dict(processor_kwargs or {})
        self._specs: dict[str, ItemSpec] = {}
        self._lock = Lock()

    def check(self, modality: str, kwargs: object, num_embeds: int | None = None) -> None:
        """Raise `RequestError` if tensors can't be those of a processed item of this modality.

        `num_embeds` is how many placeholder tokens the item has in its prompt, or `None` if
        unknown.
        """
        if not isinstance(kwargs, Mapping):
            raise RequestError(
                f"tensors must be a map from names to tensors, not {type(kwargs).__name__}"
            )
        self._get_spec(modality).check(modality, kwargs, num_embeds)

    def check_encoded(self, modality: str, kwargs: Mapping[str, Any], num_embeds: int) -> None:
        """Raise `RequestError` if tensors don't fit an encoder output of `num_embeds` rows."""
        self._get_spec(modality).check_encoded(modality, kwargs, num_embeds)

    def _get_spec(self, modality: str) -> ItemSpec:
        if modality not in self._processor.modalities:
            raise RequestError(f"this model takes no {modality}")
        with self._lock:
            if modality not in self._specs:
                merge_size = int(self._processor.get_option_default("merge_size") or 1)
                self._specs[modality] = make_spec(self._make_samples(modality), merge_size)
            return self._specs[modality]

    def _make_samples(self, modality: str) -> list[ProcessedItem]:
        """Return processed sample media of different sizes.

        A processor may refuse some of the media as too long or too thin. If it refuses all of them,
        its last `RequestError` is raised.
        """
        samples: list[ProcessedItem] = []
        refusal: RequestError | None = None
        for media in make_varied_media(modality, self._processor.sampling_rate or 0):
            try:
                with self._processor_lock:
                    samples.append(
                        self._processor.process_item(modality, media, self._processor_kwargs)
                    )
            except RequestError as error:
                refusal = error
        if refusal is not None and not samples:
            raise refusal
        return samples


class StoredItems:
    """A thread-safe check of items from a store, by the rules for items that a client sends.

    A checksum proves that an entry is as it was written, and not that it makes sense: another
    version, or somebody else with access to the store, may have written it. With wrong sizes the
    request would fail, or the model would allocate any amount of memory for positions. `lock` is
    held while the model's processor is used, here and in other modules.
    """

    def __init__(self, processor: MultiModalProcessor, lock: Lock) -> None:
        self._processor = processor
        self._lock = lock
        self._specs: LruCache[str, ItemSpecs] = LruCache(_MAX_OPTION_SETS)  # by options

    def check(self, job: ItemJob, item: ProcessedItem) -> None:
        """Raise a `RequestError` if processing the job can't have made this item."""
        layout, kwargs = item.layout, item.kwargs
        if layout is None or item.modality != job.modality:
            raise RequestError(f"it is no {job.modality} with a layout")
        self._processor.check_layout(job.modality, layout)
        key = repr(sorted(job.processor_kwargs.items()))
        specs = self._specs.get(key)
        if specs is None:
            specs = ItemSpecs(self._processor, job.processor_kwargs, lock=self._lock)
            self._specs.put(key, specs)
        if ENCODED in kwargs:
            others = {name: tensor for name, tensor in kwargs.items() if name != ENCODED}
            specs.check_encoded(job.modality, others, layout.num_embeds)
        else:
            specs.check(job.modality, kwargs, layout.num_embeds)
        for name, tensor in kwargs.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise RequestError(f"{name} holds values that are not finite numbers")


def make_spec(samples: Sequence[ProcessedItem], merge_size: int) -> ItemSpec:
    """Return the rules that all given samples obey, which are of one modality and different sizes.

    `merge_size` is the number of patches along an edge that the model merges into one embedding, or
    1 if it merges none.
    """
    first = samples[0].kwargs
    tensors = {
        name: _make_rule(samples[0].modality, name, [s.kwargs[name] for s in samples])
        for name in first
    }
    return ItemSpec(
        tensors=tensors,
        links=_find_links(samples, tensors),
        grids=tuple(
            (name, rows)
            for name in first
            for rows in first
            if name != rows and all(_is_grid_of(s.kwargs, name, rows) for s in samples)
        ),
        merge_size=merge_size if any(name.endswith("grid_thw") for name in first) else 1,
        yields=_find_yields(samples),
    )


def _make_rule(modality: str, name: str, tensors: Sequence[torch.Tensor]) -> TensorRule:
    first = tensors[0]
    is_position = name.endswith("position_ids") and first.ndim > 1
    num_fixed = first.ndim - 1 if is_position else _get_num_fixed(modality, first)
    sizes = tuple(
        size
        if index >= first.ndim - num_fixed and all(t.shape[index] == size for t in tensors)
        else None
        for index, size in enumerate(first.shape)
    )
    return TensorRule(
        dtype=first.dtype,
        sizes=sizes,
        is_mask=name.endswith("mask") and not first.is_floating_point(),
        is_position=is_position,
    )


def _get_num_fixed(modality: str, tensor: torch.Tensor) -> int:
    """Return how many of the last dimensions do not depend on the size of the media item.

    These are the features of a patch, the colours, height and width of a tile, or the bands and
    frames of a window of audio. The dimensions before them count patches, tiles or windows.
    """
    if tensor.numel() <= _MAX_SIZES:
        return tensor.ndim
    if modality == "audio":
        return tensor.ndim - 1
    if tensor.ndim >= 4:
        return 3 if tensor.is_floating_point() else 2
    return 1 if tensor.ndim > 1 else 0


def _find_links(
    samples: Sequence[ProcessedItem], tensors: Mapping[str, TensorRule]
) -> tuple[tuple[_Dimension, _Dimension], ...]:
    """Return pairs of dimensions that are equal in all samples.

    The first one is of a mask or of positions, the second one of the tensor that they describe.
    """
    described = [name for name, rule in tensors.items() if rule.is_mask or rule.is_position]
    return tuple(
        ((name, index), (other, other_index))
        for name in described
        for other, rule in tensors.items()
        if other not in described and samples[0].kwargs[other].numel() > _MAX_SIZES
        for index in range(len(tensors[name].sizes))
        for other_index, size in enumerate(rule.sizes)
        if size is None
        and all(s.kwargs[name].shape[index] == s.kwargs[other].shape[other_index] for s in samples)
    )


def _is_grid_of(kwargs: MultiModalKwargsItem, name: str, rows: str) -> bool:
    """Return True if the tensor `name` has sizes that give the number of rows of `rows`."""
    grid, tensor = kwargs[name], kwargs[rows]
    is_sizes = grid.dtype in (torch.int32, torch.int64) and 1 <= grid.ndim <= 2
    if not is_sizes or grid.shape[-1] > 3 or name.endswith("mask") or not tensor.ndim:
        return False
    return tensor.is_floating_point() and _counts_rows(grid, tensor)


def _counts_rows(grid: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if the products of the sizes in `grid` add up to the rows of `tensor`.

    They are computed in floating point, because a product of large integers may overflow.
    """
    return _count_rows(grid) == len(tensor)


def _count_rows(grid: torch.Tensor) -> float | None:
    """Return the sum of the products of the sizes in a grid, or None if a size is below 1."""
    sizes = grid.double()  # a product of large integers may overflow
    return float(sizes.prod(-1).sum()) if bool((sizes >= 1).all()) else None


def _find_yields(samples: Sequence[ProcessedItem]) -> dict[str, tuple[int, int]]:
    """Return {name of the largest tensor: (n, m)} if n embeddings come of each m of its values.

    The result is empty if this ratio differs between samples. Encoders of packed patches (as in
    NaViT) have the same ratio for all items.
    """
    first = samples[0]
    name = max(first.kwargs, key=lambda name: first.kwargs[name].numel())
    pairs = [(s.layout.num_embeds, s.kwargs[name].numel()) for s in samples if s.layout is not None]
    if not pairs or first.kwargs[name].numel() == 0:
        return {}
    embeds, numbers = pairs[0]
    is_share = all(e * numbers == n * embeds for e, n in pairs)
    return {name: (embeds, numbers)} if is_share else {}
