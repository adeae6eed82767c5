"""Keeps host copies of tensors on the device, so that encoders need not wait for the device.

An encoder gets grids, lengths and masks as tensors on the device. It reads them back to continue,
and so waits for all pending work of the device. But the host had these numbers before. Inside
`keep_host_copies` they can be looked up: they are *known*.

`following` is for encoders that are captured as a CUDA graph and must never wait. What is computed
from known numbers alone is computed on the host, and the result is sent to the device. This is
slower than the plain way, so it is used for captures only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from sensorium.layers.attention.packed import PackedLengths
from sensorium.utils.arrays import to_device

Pair = tuple[torch.Tensor, torch.Tensor]  # the same numbers on the device and on the host
# Functions that read numbers from the device.
_READS = {
    torch.equal,
    torch.Tensor.__bool__,
    torch.Tensor.__contains__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.equal,
    torch.Tensor.item,
    torch.Tensor.tolist,
}
_COPIES = {torch.Tensor.cpu, torch.Tensor.numpy}
_MAKES = {torch.arange, torch.as_tensor, torch.tensor}
_MOVES = {torch.Tensor.to, torch.Tensor.cuda}
_CHANGES = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"),
    *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}


class HostCopies:
    """A lookup of host copies of the device's tensors, by the identity of the tensor object.

    Equal tensors are sent to the device only once. None can be sent while a CUDA graph is captured,
    so an encoder first runs once without a capture.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        # `id` of the tensor on the device -> both tensors. That on the device is kept as well,
        # because Python may reuse the `id` of an object that was freed.
        self._pairs: dict[int, Pair] = {id(pair[0]): pair for pair in pairs}
        # `id` of a tensor with the starts of packed sequences -> the lengths of the sequences
        self._lengths: dict[int, PackedLengths] = {}
        self._sent: dict[Hashable, torch.Tensor] = {}  # content -> the tensor on the device
        self._is_complete = False

    def complete(self) -> None:
        """Make `send` refuse tensors that were not sent before."""
        self._is_complete = True

    def send(self, on_host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the device's copy of a host tensor; raise `RuntimeError` if it may not be sent."""
        content = _flatten(on_host).view(torch.uint8).numpy().tobytes()
        key = (content, on_host.dtype, on_host.shape, device)
        if key not in self._sent:
            if self._is_complete:
                raise RuntimeError("it gets numbers from the host that it did not get before")
            self._sent[key] = to_device(on_host, device)
            self.add(self._sent[key], on_host.clone())  # the caller may change its own
        return self._sent[key]

    def add(self, on_device: torch.Tensor, on_host: torch.Tensor) -> None:
        self._pairs[id(on_device)] = (on_device, on_host)

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        pair = self._pairs.get(id(tensor))
        return None if pair is None else pair[1]

    def get_lengths(self, starts: torch.Tensor) -> PackedLengths:
        """Return the lengths of packed sequences from the indices at which they start.

        All layers of an encoder share one result. Without a copy of `starts`, this waits for the
        device.
        """
        host_starts = self.find(starts)
        if host_starts is None:
            host_starts = starts.cpu()
            self.add(starts, host_starts)
        if id(starts) not in self._lengths:
            self._lengths[id(starts)] = PackedLengths.from_starts(starts, host_starts)
        return self._lengths[id(starts)]


_current: ContextVar[HostCopies | None] = ContextVar("host copies of tensors", default=None)


def get_host_copies() -> HostCopies | None:
    """Return the copies of the innermost `keep_host_copies`, or None outside of any."""
    return _current.get()


@contextmanager
def keep_host_copies(pairs: Iterable[Pair]) -> Iterator[HostCopies]:
    """Make encoders compute lengths and positions from host copies of tensors, inside a `with`.

    Copies of tensors that are derived from these are added to the yielded object.
    """
    copies = HostCopies(pairs)
    token = _current.set(copies)
    try:
        yield copies
    finally:
        _current.reset(token)


class following(TorchFunctionMode):  # noqa: N801 (it is used like a function, in a `with`)
    """Compute what depends on known numbers alone on the host, inside a `with`.

    The results are sent to the device and become known. They may be new tensors where torch
    would return a view. So a model that writes into such a view computes something else, and
    its results have to be compared with those of a plain run.
    """

    def __init__(self, copies: HostCopies) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._check_changes(func, args, kwargs)
        if func in _MAKES and not given and kwargs.get("device") is not None:
            return self._make(func, args, kwargs)
        if func in _MOVES and args and (on_host := self._get(args[0])) is not None:
            return self._move(func, on_host, args, kwargs)
        if func is torch.Tensor.__getitem__:
            args = (args[0], self._count_true(args[1]))
        is_on_host = all(tensor.device.type == "cpu" for tensor in given)
        if is_on_host or any(self._get(tensor) is None for tensor in given):
            return func(*args, **kwargs)
        return self._compute(func, args, kwargs, given)

    def _check_changes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise a `RuntimeError` if a function changes a known tensor of the device.

        Equal tensors share one copy on the device, so the others would change as well.
        """
        name = getattr(func, "__name__", "")
        is_change = name.endswith("_") and not name.endswith("__")
        targets = [kwargs.get("out"), args[0] if args and (is_change or name in _CHANGES) else None]
        for target in tree_leaves(targets):
            if isinstance(target, torch.Tensor) and self._copies.find(target) is not None:
                raise RuntimeError(f"it changes numbers in place that decide what it does ({name})")

    def _get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the numbers of a tensor on the host, or None if they are only on the device."""
        return tensor if tensor.device.type == "cpu" else self._copies.find(tensor)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        device = torch.device(kwargs["device"])
        made = func(*args, **{**kwargs, "device": "cpu"})
        return made if device.type == "cpu" else self._copies.send(made, device)

    def _count_true(self, index: Any) -> Any:
        """Return an index in which known masks are replaced by the places where they are true.

        With a mask on the device, torch would have to wait to know how many places there are.
        """
        parts = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts):
            return index
        result: list[Any] = []
        for part in parts:
            is_mask = isinstance(part, torch.Tensor) and part.dtype == torch.bool
            on_host = self._get(part) if is_mask and part.device.type != "cpu" else None
            if on_host is None:
                result.append(part)
                continue
            places = on_host.nonzero(as_tuple=True)
            result += [self._copies.send(place, part.device) for place in places]
        return tuple(result)

    def _move(
        self, func: Any, on_host: torch.Tensor, args: Any, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return a known tensor on another device, or with another dtype."""
        tensor, *others = args
        goal = func(tensor.new_empty(0), *others, **kwargs)  # it is empty, so nothing is copied
        moved = on_host.to(goal.dtype, copy=True)
        return moved if goal.device.type == "cpu" else self._copies.send(moved, goal.device)

    def _compute(
        self, func: Any, args: Any, kwargs: dict[str, Any], given: list[torch.Tensor]
    ) -> Any:
        """Compute a function of known numbers, some of them on the device."""
        if getattr(func, "__name__", "") == "__get__":  # of an attribute, like `shape`
            return func(*args, **kwargs)
        host_args, host_kwargs = _map_tensors(self._get, (args, kwargs))
        if func in _COPIES:
            return func(host_args[0].clone())
        result = func(*host_args, **host_kwargs)
        if func in _READS:
            return result
        device = next(tensor.device for tensor in given if tensor.device.type != "cpu")
        if func is torch.Tensor.__iter__:
            return iter([self._copies.send(row, device) for row in result])
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            return func(*args, **kwargs)  # for example the address of a tensor
        return _map_tensors(
            # A function that is given a device may return a tensor there.
            lambda leaf: self._copies.send(leaf, device) if leaf.device.type == "cpu" else leaf,
            result,
        )


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1)


def _map_tensors(function: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Return nested values in which each tensor is replaced by a function of it."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, values)
