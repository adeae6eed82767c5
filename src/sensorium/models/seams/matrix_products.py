"""Makes the matrix products of a model faster on this device, without changing their results.

Each change is compared with the original, and undone if it differs by more than rounding.

1. Products of one input are joined: query, key and value, or the two of a gated layer. The member
that is called first multiplies by the joined weights, and the others take their shares of the
result. A share is used only by a member that is called with the very same tensor object, so it is
never wrong. (It would be if a module changed the tensor in place between two members. No family
does so.) If shares are left over several times in a row, the group is dissolved.

2. Widths are padded. A matrix with rows that are no multiple of 16 bytes gets a slow kernel: a
width of 3,420 takes three times as long as one of 3,456. If such a width lies between two products
of one module, rows of zeros are added to the first matrix and columns of zeros to the second. The
added numbers are multiplied by zero in the end.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from sensorium.models.seams.comparing import get_distance, is_rounding, make_rows

logger = logging.getLogger(__name__)

# Usual names of members of one module that are called with the same tensor.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("gate_proj", "up_proj"))
_MAX_MISSES = 3
_ALIGNMENT = 8  # in numbers of 2 bytes
_STEP = 64  # a width is padded to the next multiple of it
_NUM_ROWS = 32
_LARGE = 32.0  # how much larger the test numbers in the padding are than all others

# ---- products of one input


class SiblingGroup:
    """A group of linear layers with the same input that are computed as one matrix product."""

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        self.members = tuple(members)
        self._sizes = [member.out_features for member in members]
        # The members' own weights become views of it.
        self.weight = torch.cat(tuple(member.weight for member in members))
        biases = tuple(member.bias for member in members if member.bias is not None)
        self.bias = torch.cat(biases) if biases else None
        self._input: torch.Tensor | None = None  # the input that the shares were computed from
        self._shares: dict[int, torch.Tensor] = {}  # member's index -> its result, not taken yet
        self._num_misses = 0  # how often in a row shares were left over
        weights = self.weight.split(self._sizes)
        for index, member in enumerate(members):
            member.weight = nn.Parameter(weights[index], requires_grad=False)
            if self.bias is not None:
                bias = self.bias.split(self._sizes)[index]
                member.bias = nn.Parameter(bias, requires_grad=False)
            # It is set on the instance, where `Module.__call__` finds it before the class's.
            member.forward = partial(self._compute, index)  # type: ignore[method-assign]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all members for one input, joined in the last dimension."""
        return functional.linear(x, self.weight, self.bias)

    def _compute(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self._input is x and index in self._shares:
            share = self._shares.pop(index)
            if not self._shares:
                self._input, self._num_misses = None, 0
            return share
        # Shares are left over if an error ended the last call, or if members get other inputs.
        if self._input is not None:
            self._input, self._shares = None, {}
            self._num_misses += 1
        if self._num_misses >= _MAX_MISSES:
            return functional.linear(x, self.members[index].weight, self.members[index].bias)
        shares = dict(enumerate(self.multiply(x).split(self._sizes, dim=-1)))
        share = shares.pop(index)
        self._input, self._shares = x, shares
        return share


@torch.inference_mode()
def find_groups(model: nn.Module) -> dict[nn.Module, list[SiblingGroup]]:
    """Join layers of the same input in place, and return the groups by the containing module.

    Layers that would give other results when joined are not changed.
    """
    groups: dict[nn.Module, list[SiblingGroup]] = {}
    for parent in model.modules():
        children = dict(parent.named_children())
        for names in _SIBLINGS:
            members = [children[name] for name in names if name in children]
            if len(members) == len(names) and (group := _join(members)) is not None:
                groups.setdefault(parent, []).append(group)
    return groups


def _join(members: Sequence[nn.Module]) -> SiblingGroup | None:
    linears = [member for member in members if type(member) is nn.Linear]
    if len(linears) < len(members) or any("forward" in vars(member) for member in members):
        return None
    if len({(x.in_features, x.bias is None, x.weight.dtype) for x in linears}) > 1:
        return None
    weight = linears[0].weight
    x = make_rows(weight, linears[0].in_features)
    expected = torch.cat([member(x) for member in linears], dim=-1)
    group = SiblingGroup(linears)
    if is_rounding(get_distance(group.multiply(x), expected), weight.dtype):
        return group
    for member in linears:
        del member.forward
    return None


# ---- padded widths


@torch.inference_mode()
def align_widths(model: nn.Module) -> int:
    """Pad inner matrix widths of modules in place for faster kernels; return their number."""
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
    """Pad an inner width of a module if that keeps its results; return whether it was padded."""
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
    logger.warning(
        "%s keeps its slower width of %d: when padded, %s", type(module).__name__, width, reason
    )
    for linear, own_weight, own_bias in old:
        linear.weight, linear.bias = own_weight, own_bias
        linear.out_features, linear.in_features = own_weight.shape
    return False


def _pad(producers: Sequence[nn.Linear], consumers: Sequence[nn.Linear], num_missing: int) -> None:
    for linear in producers:
        linear.weight = _make_parameter(functional.pad(linear.weight, (0, 0, 0, num_missing)))
        if linear.bias is not None:
            linear.bias = _make_parameter(functional.pad(linear.bias, (0, num_missing)))
        linear.out_features += num_missing
    for linear in consumers:
        linear.weight = _make_parameter(functional.pad(linear.weight, (0, num_missing)))
        linear.in_features += num_missing


def _measure_padded(
    module: nn.Module,
    producers: Sequence[nn.Linear],
    width: int,
    rows: torch.Tensor,
    expected: torch.Tensor,
) -> float:
    """Return the largest relative difference between a padded module and its original.

    The module is run with zeros in the padding of the first products (`producers`), and then with
    large numbers there. These are multiplied by zero in the end. But they change the result if
    a part in between depends on all numbers, such as a norm or a softmax. A module that fails
    has the distance infinity.
    """
    try:
        distances = [_get_distance(module(rows), expected)]
        for added, others in _get_padding(producers, width):
            added.copy_(others * _LARGE)
        distances.append(_get_distance(module(rows), expected))
    except Exception:  # for example because it splits the numbers in between
        logger.debug("%s can't be padded", type(module).__name__, exc_info=True)
        return math.inf
    finally:
        for added, _ in _get_padding(producers, width):
            added.zero_()
    return max(distances, key=lambda distance: (math.isnan(distance), distance))


def _get_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


def _get_padding(
    producers: Sequence[nn.Linear], width: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of the padding rows of each weight or bias, and as many of its other rows."""
    for tensor in (tensor for linear in producers for tensor in linear.parameters()):
        yield tensor.data[width:], tensor.data[: len(tensor) - width]


def _make_parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)
