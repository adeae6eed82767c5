"""Rotary positions with two sets of factors (rope_type "longrope"), chosen for each token.

Transformers chooses by the largest position of a call, which here is a step of many requests. A
request must be computed with the factors of its own length instead, as `generate` does: the short
ones up to `long_after` tokens, the long ones for every token of it once it is longer. The scheduler
starts a request again that crosses that border.

Invariants:
  1. While tokens are chosen, nothing depends on the positions of other tokens of the step.
  2. Outside of it the model computes as Transformers wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sensorium.types.errors import ModelError

# Models that compute a sequence again in `generate` when it crosses the border. Others go on with
# keys of both kinds, in a mixture that depends on where the prompt ended.
RECOMPUTING = frozenset({"phi3", "phi4_multimodal", "phimoe"})


class LongRope:
    """The rotary modules of a decoder that have two sets of factors, if it has any."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        # The most tokens that a request may have for the short factors. None: there is one set.
        self.long_after: int | None = None
        self._is_long: torch.Tensor | None = None  # bool [N], while a step is computed
        borders: set[int] = set()
        for module in decoder.modules():
            if found := _find_borders(module):
                borders |= found
                # An attribute of the instance: `Module.__call__` finds it before the class's.
                module.forward = self._wrap(module.forward)
        if len(borders) > 1:
            raise ModelError(
                f"{type(decoder).__name__} changes its rotary factors at different lengths "
                f"({', '.join(map(str, sorted(borders)))}): not supported"
            )
        if borders:
            (self.long_after,) = borders

    @contextmanager
    def choosing(self, is_long: torch.Tensor | None) -> Iterator[None]:
        """Give the tokens of the calls inside the long factors where `is_long` [N] is true."""
        self._is_long = is_long
        try:
            yield
        finally:
            self._is_long = None

    def _wrap(self, own_forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_long, border = self._is_long, self.long_after
            if is_long is None or border is None:
                return own_forward(x, position_ids, *args, **kwargs)
            # Tokens of short requests lie before the border; what others get here is not used.
            short = own_forward(x, position_ids.clamp(max=border - 1), *args, **kwargs)
            # One position beyond the border makes the model choose its long factors.
            beyond = torch.full_like(position_ids[..., :1], border)
            longer = torch.cat([position_ids, beyond], dim=-1)
            long = own_forward(x, longer, *args, **kwargs)
            return tuple(
                torch.where(is_long[:, None], b[..., :-1, :], a)
                for a, b in zip(short, long, strict=True)
            )

        return forward


def _find_borders(module: torch.nn.Module) -> set[int]:
    """Return the lengths at which a module changes its factors: none, unless it is rotary."""
    rope_type = getattr(module, "rope_type", None)
    if rope_type == "longrope":
        return {_get_border(module.config.rope_parameters)}  # type: ignore[union-attr]
    if isinstance(rope_type, Mapping):  # by kind of layer
        return {
            _get_border(module.config.rope_parameters[kind])  # type: ignore[union-attr,index]
            for kind, value in rope_type.items()
            if value == "longrope"
        }
    return set()


def _get_border(rope_parameters: Any) -> int:
    return int(rope_parameters["original_max_position_embeddings"])
