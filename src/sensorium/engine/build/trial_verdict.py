"""Decides whether two computations of the same log-probabilities are the same computation.

Numbers that are rounded in another order differ. How much that is depends on the model and its
dtype, so it is measured: the model on its own, once with its own attention and once rounded
otherwise. An engine may differ from the model by a small multiple of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# How often an engine's distance may be the rounding's. Tiny models that are right have at most 1.7
# times the worst position's and 0.9 times the overall one; models of the wrong kind have 17 and 11,
# or more (ADR 22).
_WORST_FACTOR = 5.0
_OVERALL_FACTOR = 2.5
# Rounding is taken to be at least this: two attentions may happen to round in the same way.
_LEAST_ROUNDING = {torch.float32: 1e-4, torch.float16: 3e-4, torch.bfloat16: 2e-3}
# Where rounding alone changes this much, a comparison says nothing.
_MOST_ROUNDING = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far two sets of log-probabilities lie apart, as root mean squares."""

    overall: float  # over all that was compared
    worst: float  # over the tokens of one position, where that is most

    @staticmethod
    def measure(some: Sequence[float], others: Sequence[float], lengths: Sequence[int]) -> Distance:
        """Compare values that belong to positions one after another, `lengths` of them to each."""
        squares = (torch.tensor(some) - torch.tensor(others)).square()
        positions = [float(part.mean().sqrt()) for part in torch.split(squares, list(lengths))]
        # A number that is none must not get lost in a maximum.
        worst = max(positions) if all(value >= 0 for value in positions) else float("nan")
        return Distance(overall=float(squares.mean().sqrt()), worst=worst)


def find_fault(ours: Distance, rounding: Distance, dtype: torch.dtype) -> str | None:
    """Return why an engine's distance from its model is no rounding, or `None` if it may be."""
    if not rounding.overall <= _MOST_ROUNDING:
        return (
            "its log-probabilities can't be compared: rounding alone changes them by "
            f"{rounding.overall:.2g} in {str(dtype).removeprefix('torch.')}"
        )
    least = _LEAST_ROUNDING[dtype]
    is_overall_right = ours.overall <= _OVERALL_FACTOR * max(least, rounding.overall)
    if is_overall_right and ours.worst <= _WORST_FACTOR * max(least, rounding.worst):
        return None
    return (
        "the model on its own computed something else (log-probabilities differ by "
        f"{ours.worst:.2g} at the worst position, rounding alone by {rounding.worst:.2g}): it does "
        "more between its encoders and its logits than is known here"
    )
