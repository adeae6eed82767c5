"""Joins the matrix products of one input: query, key and value, or the two of a gated layer.

Their weights become parts of one matrix. The member that is called first multiplies by all of it,
and the others take their shares of the result. A share is used only by a member that is called with
the very same tensor object, so a member that is called with another tensor never gets a wrong
share. (It would if a module changed the tensor in place between two members. No family does so.) If
shares are left over several times in a row, the group is dissolved, and its members compute for
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

from sensorium.models.seams.comparing import get_distance, is_rounding, make_rows

# Usual names of members of one module that are called with the same tensor.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("gate_proj", "up_proj"))
_MAX_MISSES = 3


class SiblingGroup:
    """A group of products of one input. The weights of its members are views of `weight`."""

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        self.members = tuple(members)
        self._sizes = [member.out_features for member in members]
        self.weight = torch.cat(tuple(member.weight for member in members))
        biases = tuple(member.bias for member in members if member.bias is not None)
        self.bias = torch.cat(biases) if biases else None
        self._input: torch.Tensor | None = None  # the input that the shares were computed from
        self._shares: dict[int, torch.Tensor] = {}  # member's index -> its result, not taken yet
        self._num_misses = 0  # how often in a row shares were left over
        for member, weight in zip(members, self.weight.split(self._sizes), strict=True):
            member.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            for member, bias in zip(members, self.bias.split(self._sizes), strict=True):
                member.bias = nn.Parameter(bias, requires_grad=False)
        for index, member in enumerate(members):
            # It is set on the instance, where `Module.__call__` finds it before the class's.
            member.forward = partial(self._compute, index)  # type: ignore[method-assign]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the products of all members, joined in the last dimension."""
        return linear(x, self.weight, self.bias)

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
            return linear(x, self.members[index].weight, self.members[index].bias)
        shares = dict(enumerate(self.multiply(x).split(self._sizes, dim=-1)))
        share = shares.pop(index)
        self._input, self._shares = x, shares
        return share

    def undo(self) -> None:
        for member in self.members:
            del member.forward


@torch.inference_mode()
def find_groups(model: nn.Module) -> dict[nn.Module, list[SiblingGroup]]:
    """Join the products of a model that have the same input. Return the groups by their parent.

    Products that would give other results when joined are left as they are.
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
    group.undo()
    return None
