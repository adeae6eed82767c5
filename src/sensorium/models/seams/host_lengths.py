"""Lets encoders compute lengths and positions on the host, so that they don't wait for the device.

An encoder, or tower, gets the grids of its pictures as a tensor on the device. It derives
positions, windows and lengths from it with functions of `transformers.vision_utils`. These read the
tensor back, and so wait for all pending work of the device. But the host had the grids before.
Inside `keeping` these functions compute on the host and send their results to the device.

The functions are replaced in the Python modules of the towers, under the names that are used there.
Outside `keeping` they work as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, vision_utils
from transformers.utils.generic import get_max_seqlen

from sensorium.utils.arrays import to_device

_T = TypeVar("_T")
Pair = tuple[torch.Tensor, torch.Tensor]  # the same numbers on the device and on the host


class _Copies:
    """The host's copies of tensors on the device."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        # `id` of the tensor on the device -> both tensors. That on the device is kept as well,
        # because Python may reuse the `id` of an object that was freed.
        self._pairs: dict[int, Pair] = {}
        # (`id` of the tensor on the device, function) -> the function's result
        self.derived: dict[tuple[int, Callable[..., Any]], Any] = {}
        for on_device, on_host in pairs:
            self.add(on_device, on_host)

    def add(self, on_device: torch.Tensor, on_host: torch.Tensor) -> None:
        self._pairs[id(on_device)] = (on_device, on_host)

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        pair = self._pairs.get(id(tensor))
        return None if pair is None else pair[1]


_current: ContextVar[_Copies | None] = ContextVar("host copies of tensors", default=None)


@contextmanager
def keeping(pairs: Iterable[Pair]) -> Iterator[None]:
    """Use these host copies, and those that are derived from them, inside a `with`."""
    token = _current.set(_Copies(pairs))
    try:
        yield
    finally:
        _current.reset(token)


def get_host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the host's copy of a tensor. If there is none yet, this waits for the device."""
    copies = _current.get()
    if tensor.device.type == "cpu" or copies is None:
        return tensor.cpu()
    found = copies.find(tensor)
    if found is None:
        found = tensor.cpu()
        copies.add(tensor, found)
    return found


def derive(tensor: torch.Tensor, make: Callable[[torch.Tensor, torch.Tensor], _T]) -> _T:
    """Return the result of a function of a tensor on the device and its copy on the host.

    All layers of a tower need the same result, so inside `keeping` it is computed only once.
    """
    on_host = get_host_copy(tensor)
    copies = _current.get()
    if copies is None or copies.find(tensor) is None:
        return make(tensor, on_host)
    key = (id(tensor), make)
    if key not in copies.derived:
        copies.derived[key] = make(tensor, on_host)
    result: _T = copies.derived[key]
    return result


def compute_on_host(towers: Iterable[PreTrainedModel]) -> None:
    """Replace the functions with which towers compute lengths and positions.

    That is done once for each Python module.
    """
    for name in {type(tower).__module__ for tower in towers}:
        names = vars(sys.modules[name])
        for key, value in list(names.items()):
            if _derives_from_grids(value):
                names[key] = _on_host(value)


def _derives_from_grids(value: Any) -> bool:
    if getattr(value, "computes_on_host", False) or not callable(value):
        return False
    is_helper = getattr(value, "__module__", None) == vision_utils.__name__
    return value is get_max_seqlen or (is_helper and value.__name__.startswith("get_"))


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def compute(*arguments: Any, **options: Any) -> Any:
        copies = _current.get()
        given = [*arguments, *options.values()]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        if copies is None or any(copies.find(tensor) is None for tensor in tensors):
            return function(*arguments, **options)
        result = function(
            *(_replace(value, copies) for value in arguments),
            **{name: _replace(value, copies) for name, value in options.items()},
        )
        device = tensors[0].device
        if isinstance(result, tuple):
            return tuple(_send(value, device, copies) for value in result)
        return _send(result, device, copies)

    compute.computes_on_host = True  # type: ignore[attr-defined]
    return compute


def _replace(value: Any, copies: _Copies) -> Any:
    return copies.find(value) if isinstance(value, torch.Tensor) else value


def _send(value: Any, device: torch.device, copies: _Copies) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    sent = to_device(value, device)
    copies.add(sent, value)
    return sent
