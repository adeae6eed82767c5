"""Pads matrix products that are slow on GPUs because of their width.

A matrix with rows that are no multiple of 16 bytes gets a slow kernel: a width of 3,420 takes three
times as long as one of 3,456. If such a width lies between two products of one module, rows of
zeros are added to the first matrix and columns of zeros to the second. The added numbers are
multiplied by zero in the end, so the result is the same. Each module is compared with its original.
If it differs, it stays as it was.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.functional import pad

logger = logging.getLogger(__name__)

_ALIGNMENT = 8  # in numbers of 2 bytes
_STEP = 64  # a width is padded to the next multiple of it
_NUM_ROWS = 32
_LARGE = 32.0  # how much larger the test numbers in the padding are than others


@torch.inference_mode()
def align_widths(model: nn.Module) -> int:
    """Pad the inner widths of a model's modules in place. Return how many modules were padded."""
    num_uses = Counter(id(child) for module in model.modules() for child in module.children())
    padded = 0
    for module in list(model.modules()):
        linears = [child for child in module.children() if type(child) is nn.Linear]
        if any(num_uses[id(linear)] > 1 for linear in linears):
            continue
        for width in {linear.out_features for linear in linears}:
            padded += width % _ALIGNMENT != 0 and _align(module, linears, width)
    if padded:
        logger.info("padded the widths of %d modules, to compute faster on this device", padded)
    return padded


def _align(module: nn.Module, linears: Sequence[nn.Linear], width: int) -> bool:
    """Pad one width of a module if that does not change its results. Return whether it was done."""
    producers = [linear for linear in linears if linear.out_features == width]
    consumers = [linear for linear in linears if linear.in_features == width]
    if not consumers or set(producers) & set(consumers):
        return False
    own = {id(parameter) for linear in producers + consumers for parameter in linear.parameters()}
    if any(width in p.shape for p in module.parameters() if id(p) not in own):
        return False  # it has a norm, or another part that depends on all numbers in between
    weight = producers[0].weight
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_NUM_ROWS, producers[0].in_features, generator=generator).to(weight)
    try:
        expected = module(rows)
    except Exception:
        logger.debug("%s takes more than one tensor", type(module).__name__, exc_info=True)
        return False
    old = [(linear, linear.weight, linear.bias) for linear in producers + consumers]
    _pad(producers, consumers, -width % _STEP)
    distance = _measure_padded(module, producers, width, rows, expected)
    if distance <= 4 * torch.finfo(weight.dtype).eps:
        return True
    reason = "it can't be run" if distance == math.inf else f"its results are off by {distance:.3g}"
    logger.warning("%s stays with a width of %d: padded, %s", type(module).__name__, width, reason)
    for linear, own_weight, own_bias in old:
        linear.weight, linear.bias = own_weight, own_bias
        linear.out_features, linear.in_features = own_weight.shape
    return False


def _pad(producers: Sequence[nn.Linear], consumers: Sequence[nn.Linear], num_missing: int) -> None:
    for linear in producers:
        _set(linear, pad(linear.weight, (0, 0, 0, num_missing)), linear.bias, num_missing)
    for linear in consumers:
        linear.weight = _make_parameter(pad(linear.weight, (0, num_missing)))
        linear.in_features += num_missing


def _measure_padded(
    module: nn.Module,
    producers: Sequence[nn.Linear],
    width: int,
    rows: torch.Tensor,
    expected: torch.Tensor,
) -> float:
    """Return the largest relative difference between a padded module and its original.

    The module is run with zeros in the padding of the first products, and then with large numbers
    instead. These are multiplied by zero in the end. But they change the result if something in
    between depends on all numbers, such as a norm or a softmax.
    """
    try:
        distances = [_get_distance(module(rows), expected)]
        for added, others in _get_padding(producers, width):
            added.copy_(others * _LARGE)
        distances.append(_get_distance(module(rows), expected))
    except Exception:  # for example because it splits the numbers in between
        logger.debug("%s can't be padded", type(module).__name__, exc_info=True)
        return float("inf")
    finally:
        for added, _ in _get_padding(producers, width):
            added.zero_()
    return max(distances, key=lambda distance: (math.isnan(distance), distance))


def _get_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


def _get_padding(
    producers: Sequence[nn.Linear], width: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the added rows of each product, with as many of its other rows."""
    for tensor in (tensor for linear in producers for tensor in linear.parameters()):
        yield tensor.data[width:], tensor.data[: len(tensor) - width]


def _set(
    linear: nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None, num_missing: int
) -> None:
    linear.weight = _make_parameter(weight)
    if bias is not None:
        linear.bias = _make_parameter(pad(bias, (0, num_missing)))
    linear.out_features += num_missing


def _make_parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)
