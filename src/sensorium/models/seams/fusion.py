"""Fuses what a model computes in many small kernels, without touching its source.

Six seams are known: badly aligned widths, siblings among products, gated layers, norms, sums with
the norm behind them, and rotary positions. Each replacement is compared with the original on random
input when it is made; what differs by more than rounding stays as it was. `paused` gives the
originals back for a while, but for widths, which stay padded.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from sensorium.layers import kernels
from sensorium.models.seams.aligned_widths import align_widths
from sensorium.models.seams.comparing import get_distance, is_rounding, make_rows
from sensorium.models.seams.residual_layers import find_parts, make_forward
from sensorium.models.seams.sibling_products import SiblingGroup, find_groups

logger = logging.getLogger(__name__)

_ROTARY_PREFIXES = ("apply_rotary_pos_emb", "apply_multimodal_rotary_pos_emb")
_EPS_NAMES = ("variance_epsilon", "eps")


@dataclass
class Fusion:
    """What was fused in a model. `counts` says how often, by kind."""

    counts: Counter[str] = field(default_factory=Counter)
    _forwards: list[tuple[nn.Module, Callable[..., Any]]] = field(default_factory=list)

    def __str__(self) -> str:
        counts = [f"{count} {kind}" for kind, count in self.counts.items() if count]
        return ", ".join(counts) or "nothing"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model compute as Transformers wrote it."""
        self.turn_off()
        try:
            yield
        finally:
            for module, forward in self._forwards:
                module.forward = forward

    def turn_off(self) -> None:
        for module, _ in self._forwards:
            del module.forward

    def add_forward(self, kind: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.counts[kind] += 1
        self._forwards.append((module, forward))
        module.forward = forward


@torch.inference_mode()
def fuse(model: nn.Module, device: torch.device) -> Fusion:
    """Fuse what can be fused in a model on this device."""
    fusion = Fusion()
    if device.type == "cuda" and next(model.parameters()).dtype.itemsize == 2:
        fusion.counts["padded widths"] = align_widths(model)
    groups = find_groups(model)
    for group in groups.values():
        fusion.counts["joined products"] += 1
        for member in group.members:
            fusion._forwards.append((member, member.forward))
    if kernels.find_obstacle(device) is None:
        for module in model.modules():
            _fuse_gate(fusion, module, groups.get(module))
        norms = {module: norm for module in model.modules() if (norm := _fuse_norm(fusion, module))}
        for module in model.modules():
            _fuse_residual(fusion, module, norms)
        _fuse_rotary_positions(fusion, model)
    return fusion


# ---- gated layers


def _fuse_gate(fusion: Fusion, layer: nn.Module, group: SiblingGroup | None) -> None:
    from sensorium.layers.kernels.gate import KINDS, activate_and_multiply

    both = getattr(layer, "gate_up_proj", None)  # some models have joined them themselves
    down = getattr(layer, "down_proj", None)
    multiply: Callable[[torch.Tensor], torch.Tensor]
    if isinstance(both, nn.Linear):
        weight, multiply = both.weight, both
    elif group is not None and len(group.members) == 2:
        weight, multiply = group.weight, group.multiply
    else:
        return
    if not isinstance(down, nn.Linear) or not _takes_one(layer):
        return
    x = make_rows(weight, weight.shape[1])
    expected = layer(x)

    def forward(x: torch.Tensor, *, kind: str) -> torch.Tensor:
        return down(activate_and_multiply(multiply(x), kind=kind))

    for kind in KINDS:
        if is_rounding(get_distance(forward(x, kind=kind), expected), x.dtype):
            fusion.add_forward("gated layers", layer, partial(forward, kind=kind))
            return


# ---- norms, and sums in front of them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    weight: torch.Tensor
    variant: dict[str, Any]  # of the kernel


def _fuse_norm(fusion: Fusion, module: nn.Module) -> _Norm | None:
    from sensorium.layers.kernels.rms_norm import normalize

    eps = next((getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)), None)
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or eps is None or not _takes_one(module):
        return None
    if weight is None:  # its width is not known here
        return None
    x = make_rows(weight, len(weight))
    expected = module(x)
    variants: list[dict[str, Any]] = [
        {"eps": float(eps), "offset": offset, "rounds_first": rounds_first}
        for offset in (0.0, 1.0)
        for rounds_first in (True, False)
    ]
    distances = [get_distance(normalize(x, weight, **variant), expected) for variant in variants]
    if not is_rounding(min(distances), x.dtype):
        return None
    norm = _Norm(weight=weight, variant=variants[distances.index(min(distances))])
    fusion.add_forward("norms", module, partial(normalize, weight=weight, **norm.variant))
    return norm


def _fuse_residual(fusion: Fusion, layer: nn.Module, norms: Mapping[nn.Module, _Norm]) -> None:
    from sensorium.layers.kernels.rms_norm import add_and_normalize

    parts = find_parts(layer)
    if parts is None or (norm := norms.get(parts.second_norm)) is None:
        return
    add = partial(add_and_normalize, weight=norm.weight, **norm.variant)
    if (forward := make_forward(layer, parts, norm.weight, add)) is not None:
        fusion.add_forward("sums with norms", layer, forward)


# ---- rotary positions


def _fuse_rotary_positions(fusion: Fusion, model: nn.Module) -> None:
    """Let attention modules rotate by our kernel, each in a copy of its `forward` that finds our
    function under the name of Transformers'. Other models in the process keep theirs.
    """
    weight = next(model.parameters())
    forwards: dict[Any, FunctionType | None] = {}
    for module in model.modules():
        forward: Any = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue
        if forward not in forwards:
            forwards[forward] = _make_rotating(forward, weight)
        if (rotating := forwards[forward]) is not None:
            fusion.add_forward("rotary positions", module, MethodType(rotating, module))


def _make_rotating(forward: FunctionType, weight: torch.Tensor) -> FunctionType | None:
    functions = {
        name: rotate
        for name in forward.__code__.co_names
        if name.startswith(_ROTARY_PREFIXES)
        and (rotate := _make_rotate(forward.__globals__.get(name), weight)) is not None
    }
    if not functions:
        return None
    names = {**forward.__globals__, **functions}
    rotating = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    rotating.__kwdefaults__ = forward.__kwdefaults__
    return rotating


def _make_rotate(original: Any, weight: torch.Tensor) -> Callable[..., Any] | None:
    """Return what can take the place of a function of Transformers, if something can."""
    from sensorium.layers.kernels.rotary import rotate

    parameters = list(inspect.signature(original).parameters) if callable(original) else []
    if parameters[:4] != ["q", "k", "cos", "sin"]:
        return None

    def rotate_both(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        is_dense = q.stride(-1) == k.stride(-1) == 1
        if arguments or options or not is_dense or cos.shape[-1] != q.shape[-1]:
            return original(q, k, cos, sin, *arguments, **options)
        if q.ndim == 3 and cos.ndim == 2:  # [N, H, D], as encoders have it
            return rotate(q, k, cos.contiguous(), sin.contiguous())
        if q.ndim == 4 and len(q) == 1 and cos.ndim == 3:  # [1, H, N, D]
            cos, sin = cos[0].contiguous(), sin[0].contiguous()
            new_q, new_k = rotate(q[0].transpose(0, 1), k[0].transpose(0, 1), cos, sin)
            return new_q.transpose(0, 1)[None], new_k.transpose(0, 1)[None]
        return original(q, k, cos, sin)

    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    if "unsqueeze_dim" in parameters:
        shapes = [((1, 4, 6, size), (1, 6, size)) for size in (64, 128)]
    else:
        shapes = [((6, 4, size), (6, size)) for size in (64, 80)]
    try:
        agrees = all(_agrees(rotate_both, original, *shape, weight) for shape in shapes)
    except Exception:  # a function that is called in another way
        logger.debug("%s was not tried", original, exc_info=True)
        return None
    return rotate_both if agrees else None


def _agrees(
    rotate: Callable[..., Any],
    original: Callable[..., Any],
    shape: tuple[int, ...],
    angles: tuple[int, ...],
    weight: torch.Tensor,
) -> bool:
    generator = torch.Generator().manual_seed(0)
    # Angles differ for both halves: a function that pairs neighbours must not look like this one.
    inputs = [
        torch.randn(size, generator=generator).to(weight) for size in (shape, shape, angles, angles)
    ]
    pairs = zip(rotate(*inputs), original(*inputs), strict=True)
    return all(is_rounding(get_distance(a, b), weight.dtype) for a, b in pairs)


# ---- what all need


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 2  # and itself
