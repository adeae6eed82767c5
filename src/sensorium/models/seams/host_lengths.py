"""Spares towers the wait for the device when they need the sizes of pictures as numbers.

A tower gets the grids of its pictures as a tensor on the device, and derives positions, windows and
lengths from it with functions of `transformers.vision_utils`. They read the tensor back, and so
wait for all work that the device has. The host knew the grids before. Inside `keeping` these
functions compute on the host and send their results to the device.

The functions are replaced in the modules of the towers, under the names by which these call them.
Outside `keeping` they do what they did before.
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
Pair = tuple[torch.Tensor, torch.Tensor]  # the same numbers: on the device, on the host


class _Copies:
    """The host's copies of tensors on the device. Both are kept: a freed `id` is given again."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pairs: dict[int, Pair] = {}
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
    """Know these copies, and those that are made of them, inside a `with`."""
    token = _current.set(_Copies(pairs))
    try:
        yield
    finally:
        _current.reset(token)


def get_host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host. If the host has no copy yet, this waits for the device."""
    copies = _current.get()
    if tensor.device.type == "cpu" or copies is None:
        return tensor.cpu()
    found = copies.find(tensor)
    if found is None:
        found = tensor.cpu()
        copies.add(tensor, found)
    return found


def derive(tensor: torch.Tensor, make: Callable[[torch.Tensor, torch.Tensor], _T]) -> _T:
    """Return what a function makes of a tensor on the device and its copy on the host.

    All layers of a tower ask for the same, so it is made once inside `keeping`.
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
    """Replace what towers call to learn lengths and positions, once for each module of code."""
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
